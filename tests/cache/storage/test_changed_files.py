"""A model's files change under a running engine: a state belongs to the bytes that were loaded, or to nothing.

`python -m tests.long.change_files` runs 200 random orders, `python -m tests.long.break_disk` 100 broken disks.
"""

import json
import os
import time

import pytest

import mlxrt
from mlxrt import EngineConfig, Session
from mlxrt.weights import identity
from mlxrt.weights.identity import FileStamp, check_loaded, loaded_digest, stamp_files, weights_digest
from tests.cli.conftest import CONFIG, Folder, weights, write_tokenizer
from tests.long.break_disk import run_programs
from tests.long.change_files import run_orders

from ...support.log_lines import capture_log


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MLXRT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path):
    made = Folder(tmp_path / "tiny")
    made.path.mkdir()
    made.configure()
    made.store(weights())
    write_tokenizer(made.path)
    return made


def open_engine(folder, **options):
    return mlxrt.load(str(folder), EngineConfig(chunk=16, **options))


@pytest.mark.parametrize("gguf", [False, True])
def test_random_orders(tmp_path, gguf):
    wrong, (accepted, _, _) = run_orders(tmp_path, orders=6, seed=3, gguf=gguf, events=16)
    assert wrong == [] and accepted


def test_broken_disks(tmp_path):
    assert run_programs(tmp_path, programs=6, seed=5) == []


def test_a_state_of_an_edited_model_is_refused(folder, tmp_path):
    """As a user meets it: config.json is edited while a conversation runs, which is saved afterwards."""
    with open_engine(folder) as engine:
        session = engine.session(max_tokens=4)
        session.say("why is the sky blue?").text  # noqa: B018
        folder.configure(rope_theta=500000.0)
        session.save(tmp_path / "state")
    with open_engine(folder) as changed, pytest.raises(mlxrt.BadSnapshot, match="another weights"):
        Session.restore(changed, tmp_path / "state")
    folder.configure()
    with open_engine(folder) as engine:
        restored = Session.restore(engine, tmp_path / "state", max_tokens=4)
        assert (
            restored.tokens == session.tokens and restored.say("no").completion.cached_tokens >= len(session.tokens) - 1
        )


def test_large_files_that_moved_have_no_identity(folder, tmp_path, monkeypatch):
    """Too large to be hashed at load. Removed and changed ones are named; one that never moved is hashed late."""
    monkeypatch.setattr(identity, "HASHED_AT_LOAD", 0)
    path = folder.path / "model.safetensors"
    with open_engine(folder) as engine:
        engine.generate("hello", max_tokens=2)
        content = path.read_bytes()
        path.unlink()
        state = engine.compute_state(engine.tokenizer.encode("hello"))
        with pytest.raises(mlxrt.BadSnapshot, match=r"model\.safetensors cannot be read any more"):
            engine.save_state(tmp_path / "state", state, {})
        path.write_bytes(content)
        with pytest.raises(mlxrt.BadSnapshot, match=r"model\.safetensors has changed since it was loaded"):
            engine.save_state(tmp_path / "state", state, {})
        assert not (tmp_path / "state").exists()
    with open_engine(folder) as engine:
        engine.generate("hello", max_tokens=2)
        engine.save_state(tmp_path / "state", engine.compute_state(engine.tokenizer.encode("hello")), {})


def test_a_large_file_whose_digest_is_known_may_be_touched(folder, monkeypatch):
    monkeypatch.setattr(identity, "HASHED_AT_LOAD", 0)
    monkeypatch.setattr(identity, "MIN_AGE", -1.0)
    files = sorted(folder.path.iterdir())
    stamps = check_loaded(stamp_files(folder.path), files)
    known = loaded_digest(stamps)
    assert known == weights_digest(files)
    for file in files:
        os.utime(file)
    assert loaded_digest(stamps) == known
    files[0].write_bytes(b"x")
    with pytest.raises(mlxrt.BadSnapshot, match="has changed"):
        loaded_digest(stamps)


@pytest.mark.parametrize("age", [0.0, 3600.0])
def test_files_that_change_while_they_are_loaded_are_refused(folder, age, monkeypatch):
    then = time.time() - age
    for file in folder.path.iterdir():
        os.utime(file, (then, then))
    folder_stamps = stamp_files(folder.path)
    config = folder.path / "config.json"
    before = config.stat()
    config.write_text(json.dumps(CONFIG | {"rope_theta": 20000.0}))
    os.utime(config, ns=(before.st_mtime_ns, before.st_mtime_ns))
    if age == 0.0:  # within the clock's resolution: as if even the time of the change were the same
        folder_stamps[config] = FileStamp(**(vars(FileStamp.of(config)) | {"sha256": folder_stamps[config].sha256}))
    with pytest.raises(mlxrt.BadCheckpoint, match=r"config\.json changed while it was loaded"):
        check_loaded(folder_stamps, [config])


def test_states_of_older_versions_load_until_the_arithmetic_changes(folder, tmp_path, monkeypatch):
    """Identities had no field for it: such a file is one of version 1."""
    path, store, identify = tmp_path / "state", str(tmp_path / "store"), identity.identify

    def identify_as_before(*arguments):
        return {k: v for k, v in identify(*arguments).items() if k != "arithmetic"}

    with monkeypatch.context() as m:
        m.setattr("mlxrt.engine.core.identify", identify_as_before)
        with open_engine(folder, disk_cache=store) as engine:
            session = engine.session(max_tokens=4)
            session.say("why is the sky blue?").text  # noqa: B018
            session.save(path)
    with open_engine(folder, disk_cache=store) as engine:
        assert engine.generate(list(session.tokens), max_tokens=1).cached_tokens > 8
        assert engine.stats().disk.hits == 1 and not engine.stats().disk.corrupt
        assert Session.restore(engine, path).tokens == session.tokens
    monkeypatch.setattr(identity, "ARITHMETIC", "2")
    with open_engine(folder, disk_cache=store) as engine:
        assert engine.generate(list(session.tokens), max_tokens=1).cached_tokens == 0
        with pytest.raises(mlxrt.BadSnapshot, match="another arithmetic"):
            Session.restore(engine, path)


def test_a_read_only_disk_cache_is_read(folder, tmp_path, monkeypatch):
    lines, store = capture_log("disk cache: "), tmp_path / "store"
    prompt = "why is the sky blue? and why not?"
    with open_engine(folder, disk_cache=str(store)) as engine:
        want = engine.generate(prompt, max_tokens=4).tokens

    def refuse(*_, **__):
        raise OSError(30, "Read-only file system")

    for name in ("os.utime", "os.link", "os.replace", "os.unlink", "os.chmod", "tempfile.mkstemp"):
        monkeypatch.setattr(name, refuse)
    with open_engine(folder, disk_cache=str(store)) as engine:
        for _ in range(2):
            done = engine.generate(prompt, max_tokens=4)
            assert done.tokens == want and done.cached_tokens > 8
            assert engine.generate("because of " * 8, max_tokens=4).finish_reason == "length"
            engine.core.prefix_cache.clear()
    assert len(lines) == 1 and "cannot be written" in lines[0] and "Read-only" in lines[0]
