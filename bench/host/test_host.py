"""The hot host paths by the clock: `python -m pytest bench/host`, with pytest-benchmark's own options."""

import pytest

from .work import WORK


@pytest.mark.parametrize("name", WORK)
def test_host_path(benchmark, name):
    benchmark(WORK[name]())
