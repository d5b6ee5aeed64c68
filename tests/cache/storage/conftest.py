"""What a test looks at on disk is there: records are written on a thread of their own."""

from functools import wraps

import pytest

from mlxrt.cache.storage import DiskStore


@pytest.fixture(autouse=True)
def write_at_once(monkeypatch):
    save = DiskStore.save

    @wraps(save)
    def save_and_wait(self, *args):
        save(self, *args)
        self.wait()

    monkeypatch.setattr(DiskStore, "save", save_and_wait)
