"""Which of its forms a name is taken for, and one line for every name that is none."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxrt.errors import BadRequest, MlxrtError, ModelNotFound
from mlxrt.weights.random_models import Shape
from mlxrt.weights.source import hub
from mlxrt.weights.source import resolve as module
from mlxrt.weights.source.hub import Repository
from mlxrt.weights.source.resolve import ResolvedModel, fetch, resolve

from ...support.log_lines import capture_log


@pytest.fixture
def asked(monkeypatch, tmp_path) -> list:
    """What would have been fetched; nothing is."""
    calls: list = []
    monkeypatch.setattr(hub, "download", lambda repo, **rest: calls.append((repo, rest)) or tmp_path)
    monkeypatch.setattr(module, "fetch_alias", lambda a, **rest: calls.append((a.name, rest)) or tmp_path / "m.gguf")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.chdir(tmp_path)
    return calls


def test_a_folder_and_a_file_come_first(asked, tmp_path, monkeypatch):
    for name in ("plain", "owner/name", "smollm2"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    monkeypatch.setenv("HOME", str(tmp_path))
    logged = capture_log()
    for name in ("plain", "owner/name", str(tmp_path / "plain"), "~/plain"):
        found = resolve(name)
        assert (found.name, found.kind) == (name, "folder") and found.path.samefile(os.path.expanduser(name))
    assert resolve("a.gguf").kind == "gguf"
    assert logged == []
    assert resolve("smollm2").kind == "folder" and "alias" in logged[0], "a shadowed alias is logged"
    assert asked == []


def test_a_folder_of_gguf_files(asked, tmp_path):
    folder = tmp_path / "quants"
    folder.mkdir()
    (folder / "one.gguf").write_bytes(b"GGUF")
    assert resolve("quants") == ResolvedModel("quants", "gguf", path=resolve("quants").path)
    assert resolve("quants").path.name == "one.gguf"
    (folder / "two.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelNotFound, match=r"one\.gguf.*two\.gguf"):
        resolve("quants")
    (folder / "config.json").write_text("{}")
    assert resolve("quants").kind == "folder"


def test_an_alias_a_shape_and_the_hub(asked, monkeypatch):
    assert resolve("smollm2").kind == "gguf"
    assert resolve("shape:qwen3-8b@4bit") == ResolvedModel("shape:qwen3-8b@4bit", "shape", shape=Shape("qwen3-8b", 4))
    assert resolve("us/model", token="t", offline=True).kind == "folder"
    assert resolve("us/model:q.gguf", revision="v1").kind == "gguf"
    assert [call[0] for call in asked] == ["smollm2", Repository("us/model"), Repository("us/model", "v1", "q.gguf")]
    assert [call[1]["offline"] for call in asked] == [False, True, False] and asked[1][1]["token"] == "t"
    monkeypatch.setenv("HF_HUB_OFFLINE", "true")
    resolve("smollm2")
    assert asked[-1][1]["offline"] is True


def test_names_of_other_tools_are_repositories(asked, tmp_path):
    logged = capture_log()
    assert resolve("qwen3:0.6b", offline=True, revision="v2") == ResolvedModel("qwen3:0.6b", "folder", path=tmp_path)
    assert asked == [(Repository("mlx-community/Qwen3-0.6B-4bit", "v2"), asked[0][1])] and asked[0][1]["offline"]
    assert logged == ["qwen3:0.6b is mlx-community/Qwen3-0.6B-4bit on the hub"]
    assert all(Repository.parse(id) == Repository(id) for id in hub.HUB_ALIASES.values())
    assert not hub.HUB_ALIASES.keys() & module.ALIASES.keys()


@pytest.mark.parametrize(
    ("typed", "meant"), [("smolm2", "smollm2"), ("qwen3:06b", "qwen3:0.6b"), ("llama3,2", "llama3.2")]
)
def test_a_misspelt_alias_is_named(asked, typed, meant):
    with pytest.raises(ModelNotFound, match=f"no model goes by '{typed}'; did you mean {meant}\\?; give an alias"):
        resolve(typed)


NAMES = {
    "us/model": Repository("us/model"),
    "us/model@v1": Repository("us/model", "v1"),
    "us/model@refs/pr/3": Repository("us/model", "refs/pr/3"),
    "us/model:q.gguf": Repository("us/model", None, "q.gguf"),
    "us/model/sub/q.gguf": Repository("us/model", None, "sub/q.gguf"),
    "us/model@v1:sub/q.gguf": Repository("us/model", "v1", "sub/q.gguf"),
    "us": None,
    "us/model/file.safetensors": None,
    "us/model:": None,
    "us/model@": None,
    "us/modél": None,
    "/us/model": None,
    "https://hub/us/model": None,
}


@pytest.mark.parametrize("name", NAMES)
def test_the_spelling_of_a_hub_id(name):
    assert Repository.parse(name) == NAMES[name]
    if NAMES[name] and "/sub/" not in name:
        assert str(NAMES[name]) == name


@pytest.mark.parametrize(
    "name", ["", "  ", "gpt2", "./nothing", "~/nothing", "../a/b", "/a/b", "a\0b", "x" * 5000, None, 7]
)
def test_a_name_that_is_nothing_lists_what_there_is(asked, name):
    with pytest.raises(ModelNotFound, match=r"smollm2.*folder.*gguf.*owner/name.*shape:NAME"):
        resolve(name)
    assert asked == []


def test_a_file_of_another_kind(asked, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelNotFound, match=r"folder with config\.json"):
        resolve("model.safetensors")


@pytest.mark.parametrize("name", ["smollm2", "shape:qwen3-8b", "."])
@pytest.mark.parametrize("option", ["revision", "token"])
def test_an_option_that_does_not_apply_is_refused(asked, name, option):
    with pytest.raises(BadRequest, match=f"{option} does not apply"):
        resolve(name, **{option: "x"})


def test_fetch_counts_bytes_and_asks_for_the_newest(asked, tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"x" * 7)
    assert fetch("smollm2", verify=True) == (tmp_path / "m.gguf", 7)
    assert asked[-1][1]["verify"] is True
    (tmp_path / "config.json").write_text("{}")
    assert fetch("us/model") == (tmp_path, 9)
    assert asked[-1][1]["refresh"] is True
    with pytest.raises(BadRequest, match="nothing to pull"):
        fetch("shape:qwen3-8b")


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=40) | st.from_regex(r"shape:[a-z0-9.@-]*", fullmatch=True))
def test_no_name_escapes_the_types(name):
    """Offline and in an empty cache, a name is found on the disk, is a shape, or is an error of ours."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hub, "find_cached", lambda repo: None)
        try:
            found = resolve(name, offline=True)
        except MlxrtError as error:
            assert "\n" not in str(error)
        else:
            assert found.kind in ("folder", "gguf", "shape")
