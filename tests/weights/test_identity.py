"""The digest of a model's files is remembered, and never for a file that changed."""

import hashlib
import os

import pytest

from mlxrt.weights import identity
from mlxrt.weights.identity import file_digest, weights_digest

OLD = 1_600_000_000_000_000_000


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("MLXRT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(identity, "MIN_AGE", -1.0)  # a test does not wait for files to grow old
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights")
    return path


def reads(monkeypatch):
    read = []
    digest = identity.digest
    monkeypatch.setattr(identity, "digest", lambda stream: read.append(stream.name) or digest(stream))
    return read


def test_read_once(file, monkeypatch):
    read = reads(monkeypatch)
    want = hashlib.sha256(b"weights").hexdigest()
    assert [file_digest(file) for _ in range(3)] == [want] * 3
    assert len(read) == 1
    assert weights_digest([file]) == weights_digest([file]) and len(read) == 1


def test_what_changed_is_read_again(file, monkeypatch):
    file_digest(file)
    read = reads(monkeypatch)
    file.write_bytes(b"Weights")  # as long
    os.utime(file, ns=(OLD, OLD))
    assert file_digest(file) == hashlib.sha256(b"Weights").hexdigest() and len(read) == 1
    before = file.stat()
    file.write_bytes(b"WEIGHTS")
    os.utime(file, ns=(before.st_mtime_ns, before.st_mtime_ns))  # as old and as long, still another file
    assert file_digest(file) == hashlib.sha256(b"WEIGHTS").hexdigest() and len(read) == 2


def test_a_file_that_changed_just_now_is_not_remembered(file, monkeypatch):
    monkeypatch.setattr(identity, "MIN_AGE", 3600.0)
    read = reads(monkeypatch)
    assert file_digest(file) == file_digest(file) and len(read) == 2


@pytest.mark.parametrize("content", [b"", b"[]", b'{"stamp": 3}', b"{" * 5000, b'{"sha256": "x", "stamp": null}'])
def test_a_damaged_memory_is_not_believed(file, tmp_path, content):
    want = file_digest(file)
    [memory] = tmp_path.glob("cache/digests/*.json")
    memory.write_bytes(content)
    assert file_digest(file) == want


def test_names_and_order_count(file, tmp_path):
    other = tmp_path / "other.safetensors"
    other.write_bytes(b"weights")
    assert len({weights_digest(files) for files in ([file], [other], [file, other], [other, file])}) == 4


def test_a_cache_folder_that_cannot_be_written_costs_only_time(file, tmp_path, monkeypatch):
    (tmp_path / "occupied").write_text("x")
    monkeypatch.setenv("MLXRT_CACHE", str(tmp_path / "occupied"))
    assert file_digest(file) == hashlib.sha256(b"weights").hexdigest()
