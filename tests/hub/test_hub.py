"""The hub path against a stand-in on the loopback, each load in a child process as a user would start it."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from .stand_in import Hub, commit_of, serving

ROOT = Path(__file__).resolve().parents[2]
WEIGHTS = bytes(range(256)) * 12_000  # 3 MB: several reads, so that a cut falls inside
OLD = {"config.json": b'{"model_type": "old"}', "model.safetensors": b"old weights", "tokenizer.json": b"{}"}
NEW = {
    ".gitattributes": b"*.safetensors filter=lfs",
    "README.md": b"# read me",
    "config.json": b'{"model_type": "llama"}',
    "generation_config.json": b"{}",
    "tokenizer.json": b'{"version": "1.0"}',
    "tokenizer.model": b"spm",
    "merges.txt": b"a b",
    "notes.txt": b"not needed",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"pickle",
    "consolidated.safetensors": b"the same weights again",
    "onnx/model.onnx": b"onnx",
    "onnx/config.json": b"{}",
    "original/model.safetensors": b"the same weights again",
}
NEEDED = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "merges.txt",
    "chat_template.jinja",
    "model.safetensors",
}
QUANTS = {"a.Q4_0.gguf": b"GGUF four", "sub/a.Q8_0.gguf": b"GGUF eight", "README.md": b"#"}

CHILD = """
import json, sys
from mlxrt.errors import MlxrtError
from mlxrt.weights.source import fetch, locate
order = json.loads(sys.argv[1])
said = []
call = fetch if order.pop("pull", False) else locate
try:
    found = call(order.pop("name"), say=said.append, **order)
except MlxrtError as error:
    print(json.dumps({"error": type(error).__name__, "line": str(error), "said": said}))
else:
    path, nbytes = found if isinstance(found, tuple) else (found.path, None)
    print(json.dumps({"path": str(path), "nbytes": nbytes, "said": said, "kind": getattr(found, "kind", None)}))
"""


@dataclass(frozen=True)
class Answer:
    path: Path | None
    error: str
    line: str
    said: tuple[str, ...]
    nbytes: int | None
    kind: str | None
    stderr: str

    @property
    def files(self) -> set[str]:
        return {str(file.relative_to(self.path)) for file in self.path.rglob("*") if file.is_file()}


@dataclass(frozen=True)
class User:
    """A home folder with its own cache, and an address of the hub."""

    home: Path
    address: str

    def environment(self, **more: str) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING", "XDG_", "MLXRT_"))}
        kept |= {"HOME": str(self.home), "HF_HOME": str(self.home / "hf"), "HF_ENDPOINT": self.address}
        # The stand-in is on this machine; a proxy of the environment must not be asked for it.
        kept |= {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "PYTHONPATH": str(ROOT)}
        return kept | more

    def start(self, name: str, env: dict[str, str] | None = None, **order) -> subprocess.Popen:
        command = [sys.executable, "-c", CHILD, json.dumps({"name": name, **order})]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, env=self.environment(**(env or {})), text=True, **pipes)

    def load(self, name: str, env: dict[str, str] | None = None, **order) -> Answer:
        child = self.start(name, env, **order)
        out, err = child.communicate(timeout=120)
        assert child.returncode == 0, err
        got = json.loads(out)
        path = Path(got["path"]) if got.get("path") else None
        line, said = got.get("line", ""), tuple(got["said"])
        return Answer(path, got.get("error", ""), line, said, got.get("nbytes"), got.get("kind"), err)


@pytest.fixture
def hub():
    repos = {
        "us/model": {"main": NEW, "v1": OLD},
        "us/quants": {"main": QUANTS},
        "us/pickles": {"main": {"config.json": b"{}", "pytorch_model.bin": b"x"}},
        "us/secret": {"main": OLD},
        "us/walled": {"main": OLD},
    }
    with serving(Hub(repos, private={"us/secret": "hf_right"}, gated={"us/walled"})) as hub:
        yield hub


@pytest.fixture
def user(hub, tmp_path):
    return User(tmp_path, hub.address)


def test_a_fresh_download_asks_for_what_is_needed_and_no_more(hub, user):
    got = user.load("us/model")
    assert (got.error, got.kind) == ("", "folder"), got.line
    assert got.files == NEEDED == hub.fetched()
    for name in NEEDED:
        assert (got.path / name).read_bytes() == NEW[name]
    assert len(got.said) == 1 and "7 files" in got.said[0] and hub.address in got.said[0]
    assert "%" not in got.stderr, "a progress bar without a terminal"


def test_what_is_cached_starts_without_the_network(hub, user):
    first = user.load("us/model")
    asked = len(hub.log)
    again = user.load("us/model")
    assert again.path == first.path and len(hub.log) == asked
    assert "from the cache" in again.said[0]


def test_pull_looks_for_a_newer_commit(hub, user):
    first = user.load("us/model")
    hub.repos["us/model"]["main"] = NEW | {"config.json": b'{"model_type": "qwen3"}'}
    assert user.load("us/model").path == first.path
    hub.log.clear()
    pulled = user.load("us/model", pull=True)
    assert (pulled.path / "config.json").read_bytes() == b'{"model_type": "qwen3"}'
    assert pulled.nbytes == sum(len(NEW[name]) for name in NEEDED)
    assert hub.ranges("model.safetensors") == [], "an unchanged file was fetched again"
    assert user.load("us/model").path == pulled.path


def test_a_cut_connection_is_resumed_where_it_broke(hub, user):
    hub.cuts["model.safetensors"] = [1_000_000, 500_000]
    got = user.load("us/model")
    assert got.error == "", got.line
    assert (got.path / "model.safetensors").read_bytes() == WEIGHTS
    first, *resumed = hub.ranges("model.safetensors")
    assert first == "" and len(resumed) == 2 and all(found.startswith("bytes=") for found in resumed)
    assert hub.served["model.safetensors"] == len(WEIGHTS), "bytes were served twice"


def test_a_killed_download_continues_with_the_files_that_are_missing(hub, user):
    shards = {f"model-0000{i}-of-00002.safetensors": bytes([i]) * 2_000_000 for i in (1, 2)}
    index = {"weight_map": {f"w{i}": name for i, name in enumerate(shards)}}
    files = {"config.json": b"{}", "model.safetensors.index.json": json.dumps(index).encode(), **shards}
    hub.repos["us/shards"] = {"main": files}
    second = "model-00002-of-00002.safetensors"
    hub.cuts[second] = [100_000] + [0] * 20  # no byte more: the download must give up
    failed = user.load("us/shards", env={"HF_HUB_DOWNLOAD_TIMEOUT": "2"})
    assert failed.error == "HubError" and "run it again" in failed.line
    offline = user.load("us/shards", offline=True)
    assert offline.error == "HubError", "half a model was taken for a whole one"
    hub.cuts.clear()
    before = dict(hub.served)
    got = user.load("us/shards")
    assert {name: (got.path / name).read_bytes() for name in shards} == shards
    assert hub.served["model-00001-of-00002.safetensors"] == before["model-00001-of-00002.safetensors"] == 2_000_000


@pytest.mark.parametrize("name", ["us/model@v1", "us/model"])
def test_a_revision_in_the_name_or_beside_it(hub, user, name):
    got = user.load(name) if "@" in name else user.load(name, revision="v1")
    assert got.files == set(OLD) and (got.path / "model.safetensors").read_bytes() == b"old weights"
    assert got.path.name == commit_of(OLD)
    by_commit = user.load(f"us/model@{commit_of(OLD)}", offline=True)
    assert by_commit.path == got.path


def test_offline_finds_what_is_cached_and_says_how_to_get_the_rest(hub, user):
    fetched = user.load("us/model")
    asked = len(hub.log)
    assert user.load("us/model", offline=True).path == fetched.path
    assert user.load("us/model", env={"HF_HUB_OFFLINE": "1"}).path == fetched.path
    missing = user.load("us/model@v1", offline=True)
    assert missing.error == "HubError" and "mlxrt pull us/model@v1" in missing.line
    assert user.load("us/quants:a.Q4_0.gguf", env={"HF_HUB_OFFLINE": "1"}).error == "HubError"
    assert len(hub.log) == asked


def test_one_gguf_of_many(hub, user):
    got = user.load("us/quants:a.Q4_0.gguf")
    assert got.kind == "gguf" and got.path.read_bytes() == b"GGUF four"
    nested = user.load("us/quants/sub/a.Q8_0.gguf")
    assert nested.path.read_bytes() == b"GGUF eight"
    assert hub.fetched() == {"a.Q4_0.gguf", "a.Q8_0.gguf"}
    assert user.load("us/quants:a.Q4_0.gguf", offline=True).path == got.path


REFUSED = [
    ("us/nothing", {}, "ModelNotFound", "no model us/nothing"),
    ("us/model@v9", {}, "ModelNotFound", "revision"),
    ("us/secret", {}, "HubError", "401"),
    ("us/secret", {"token": "hf_wrong"}, "HubError", "401"),
    ("us/walled", {"token": "hf_right"}, "HubError", "gated"),
    ("us/quants", {}, "ModelNotFound", "a.Q4_0.gguf"),
    ("us/quants:b.gguf", {}, "ModelNotFound", "sub/a.Q8_0.gguf"),
    ("us/pickles", {}, "UnsupportedModel", "pytorch_model.bin"),
    ("us/model@v1", {"revision": "main"}, "BadRequest", "give one"),
    ("us/-model-", {}, "ModelNotFound", "hub"),
]


@pytest.mark.parametrize(("name", "order", "error", "part"), REFUSED)
def test_a_refusal_is_one_line(hub, user, name, order, error, part):
    got = user.load(name, **order)
    assert (got.error, "\n" in got.line) == (error, False) and part in got.line, got.line
    assert not hub.fetched()


def test_a_private_model_opens_with_a_token(hub, user):
    by_argument = user.load("us/secret", token="hf_right")
    assert by_argument.files == set(OLD), by_argument.line
    other = User(user.home / "other", user.address)
    assert other.load("us/secret", env={"HF_TOKEN": "hf_right"}).files == set(OLD)


@pytest.mark.parametrize("status", [403, 418])
def test_another_status_is_named(hub, user, status):
    hub.broken["us/model"] = status
    got = user.load("us/model")
    assert got.error == "HubError" and str(status) in got.line and "\n" not in got.line


def test_a_page_instead_of_an_answer(hub, user):
    hub.html = True
    got = user.load("us/model")
    assert got.error == "HubError" and "HF_ENDPOINT" in got.line and "\n" not in got.line


def test_nobody_answers(tmp_path):
    with socket.socket() as free:  # bound and not listening: a connection is refused
        free.bind(("127.0.0.1", 0))
        got = User(tmp_path, f"http://127.0.0.1:{free.getsockname()[1]}").load("us/model")
    assert got.error == "HubError" and "check the network" in got.line and "\n" not in got.line


def test_a_silent_server_times_out(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as mute:
        user = User(tmp_path, f"http://127.0.0.1:{mute.getsockname()[1]}")
        got = user.load("us/model", env={"HF_HUB_ETAG_TIMEOUT": "1"})
    assert got.error == "HubError" and "Timeout" in got.line and "\n" not in got.line


def test_a_name_that_does_not_resolve(tmp_path):
    got = User(tmp_path, "http://hub.invalid").load("us/model")  # reserved: no resolver knows it
    assert got.error == "HubError" and "check the network" in got.line and "\n" not in got.line


@pytest.mark.parametrize("address", ["hub", "ftp://hub", "http://", "http://hub:port", "http://[::1"])
def test_an_address_that_is_none(tmp_path, address):
    got = User(tmp_path, address).load("us/model")
    assert got.error == "HubError" and "HF_ENDPOINT" in got.line


def test_verify_reads_every_byte_again(hub, user):
    got = user.load("us/model", pull=True, verify=True)
    assert got.error == "", got.line
    for name in ("model.safetensors", "config.json"):
        blob = (got.path / name).resolve()
        kept = blob.read_bytes()
        blob.write_bytes(b"X" + kept[1:])
        damaged = user.load("us/model", pull=True, verify=True)
        assert damaged.error == "BadCheckpoint" and name in damaged.line and str(blob) in damaged.line
        blob.write_bytes(kept)
    assert user.load("us/model", pull=True, verify=True).error == ""


def test_a_cache_that_cannot_be_written(hub, user):
    (user.home / "hf").write_text("a file where a folder should be")
    got = user.load("us/model")
    assert got.error == "HubError" and "\n" not in got.line and "HF_HOME" in got.line
