"""`mlxrt state` over a file, a bundle and a disk cache: what it lists is there, what it verifies is sound."""

import json

import pytest

import mlxrt


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MLXRT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def saved(folder, tmp_path):
    """single, bundle and store, made by one conversation."""
    config = mlxrt.EngineConfig(disk_cache=str(tmp_path / "store"))
    with mlxrt.load(str(folder), config) as engine:
        session = engine.session(max_tokens=4)
        session.say("a question that is long enough to fill more than one block of tokens").text  # noqa: B018
        session.save(tmp_path / "single")
        session.save(tmp_path / "bundle", "first")
        session.say("more").text  # noqa: B018
        session.save(tmp_path / "bundle", "second")
        engine.core.disk.wait()
        assert engine.stats().disk.records >= 2
    return tmp_path


def read(result):
    assert result.code == 0, result
    return json.loads(result.out)


def test_a_single_state(cli, saved):
    [entry] = read(cli("state", "ls", saved / "single", "--json"))["entries"]
    assert entry["turns"] == 1 and entry["bytes"] == (saved / "single").stat().st_size
    shown = read(cli("state", "show", saved / "single", "--json"))
    assert shown["kind"] == "state" and shown["tokens"] == entry["tokens"] and "FullKV" in shown["cache"]
    text = cli("state", "show", saved / "single").out
    assert "user: a question that is long enough" in text and "assistant: " in text
    assert "2 x FullKV(" in text and text.count("FullKV") == 1
    assert cli("state", "verify", saved / "single").code == 0
    assert "one saved state" in cli("state", "show", saved / "single", "first").refused(2)
    assert cli("state", "rm", saved / "single").code == 0 and not (saved / "single").exists()


def test_a_bundle(cli, saved):
    rows = read(cli("state", "ls", saved / "bundle", "--json"))["entries"]
    assert [row["name"] for row in rows] == ["first", "second"] and rows[0]["tokens"] < rows[1]["tokens"]
    assert "holds 2 states: first, second" in cli("state", "show", saved / "bundle").refused(2)
    assert read(cli("state", "show", saved / "bundle", "second", "--json"))["turns"] == 2
    assert "second" in cli("state", "ls", saved / "bundle").out
    assert cli("state", "verify", saved / "bundle").out.count("ok") >= 2
    assert "no state 'third'" in cli("state", "rm", saved / "bundle", "third").refused(1)
    assert read(cli("state", "rm", saved / "bundle", "first", "--json"))["removed"] == ["first"]
    assert [r["name"] for r in read(cli("state", "ls", saved / "bundle", "--json"))["entries"]] == ["second"]
    assert cli("state", "rm", saved / "bundle").code == 0 and not list((saved / "bundle").glob("*.state"))
    assert "nothing is saved" in cli("state", "ls", saved / "bundle").out


def test_a_disk_cache(cli, saved):
    files = list(saved.glob("store/*/*-*.safetensors"))
    [row] = read(cli("state", "ls", saved / "store", "--json"))["entries"]
    assert row["dtype"] == "float32"
    assert row["records"] == len(files) and row["bytes"] == sum(f.stat().st_size for f in files)
    shown = read(cli("state", "show", saved / "store", row["name"], "--json"))
    assert shown["weights"].startswith(row["weights"]) and shown["adapter"] == "none"
    assert cli("state", "verify", saved / "store").code == 0
    assert "0 models" in cli("state", "ls", saved / "store", "nope").refused(2)
    assert cli("state", "rm", saved / "store").code == 0
    assert read(cli("state", "ls", saved / "store", "--json"))["entries"] == []
    assert "nothing is saved there" in cli("state", "ls", saved / "store").out


@pytest.mark.parametrize("place", ["single", "bundle", "store"])
def test_damage_is_found_and_reported(cli, saved, place):
    pattern = {"single": "single", "bundle": "bundle/*.state", "store": "store/*/*-*.safetensors"}[place]
    file = sorted(saved.glob(pattern))[0]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    result = cli("state", "verify", saved / place)
    assert result.code == 1 and "BAD" in result.out and "digest does not match" in result.out
    found = json.loads(cli("state", "verify", saved / place, "--json").out)["entries"]
    assert any(not entry["ok"] for entry in found)
    file.unlink()
    if place == "bundle":
        assert "missing" in cli("state", "verify", saved / place).out


def test_bad_calls(cli, tmp_path):
    assert "PATH" in cli("state", "ls").refused(2) or "path" in cli("state", "ls").refused(2)
    assert "fly" in cli("state", "fly", tmp_path).refused(2)
    assert "nothing at" in cli("state", "ls", tmp_path / "absent").refused(1)
    assert "neither" in cli("state", "ls", tmp_path).refused(1)
    (tmp_path / "other").write_text("something of mine")
    for action in ("ls", "show", "rm"):
        assert "no state saved by mlxrt" in cli("state", action, tmp_path / "other").refused(1)
    assert (tmp_path / "other").read_text() == "something of mine"
    (tmp_path / "index.json").write_text("[]")
    assert "index" in cli("state", "ls", tmp_path).refused(1)


def test_flags_of_the_engine_make_a_disk_cache(cli, folder, tmp_path):
    for _ in range(2):
        result = cli("generate", "-m", folder, "-n", 4, "--json", "--disk-cache", tmp_path / "d", "x" * 90)
    assert json.loads(result.out)["cached_tokens"] >= 64
    assert "no amount of memory" in cli("generate", "-m", folder, "--disk-cache-bytes", "much", "x").refused(2)
