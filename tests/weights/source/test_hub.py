"""The hub path against a stand-in on the loopback, in child processes: the library reads its
environment when it is imported."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from mlxrt.errors import BadCheckpoint, HubError
from mlxrt.weights.source.hub import check_endpoint, verify

from ...support.fake_hub import Hub, commit_of, serving
from ...support.log_lines import capture_log

ROOT = Path(__file__).resolve().parents[3]
WEIGHTS = bytes(range(256)) * 1_000
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
SPLIT = {f"a-UD-Q2_K_XL-0000{i}-of-00002.gguf": b"GGUF %d" % i for i in (1, 2)}
TWICE = {"a-Q4_0.gguf": b"GGUF a", "b-q4_0.gguf": b"GGUF b"}
QUANTS = {"a.Q4_0.gguf": b"GGUF four", "sub/a.Q8_0.gguf": b"GGUF eight", "README.md": b"#"}

CHILD = """
import json, sys
from mlxrt.errors import MlxrtError
from mlxrt.weights.source.resolve import fetch, resolve
from tests.support.log_lines import capture_log
for order in json.loads(sys.argv[1]):
    logged = capture_log()
    call = fetch if order.pop("pull", False) else resolve
    try:
        found = call(order.pop("name"), **order)
    except MlxrtError as error:
        answer = {"error": type(error).__name__, "line": str(error)}
    else:
        path, nbytes = found if isinstance(found, tuple) else (found.path, None)
        answer = {"path": str(path), "nbytes": nbytes, "kind": "" if call is fetch else found.kind}
    print(json.dumps(answer | {"logged": logged}))
"""


@dataclass(frozen=True)
class Answer:
    path: Path = Path("/nowhere")
    error: str = ""
    line: str = ""
    logged: tuple[str, ...] = ()
    nbytes: int | None = None
    kind: str = ""

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

    def load_all(self, *orders: dict, **env: str) -> tuple[list[Answer], str]:
        """One process that loads one after the other: the answers and what it wrote to stderr."""
        command = [sys.executable, "-c", CHILD, json.dumps(orders)]
        done = subprocess.run(command, env=self.environment(**env), capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        answers = [json.loads(line) for line in done.stdout.splitlines()]
        for answer in answers:
            answer["logged"] = tuple(answer["logged"])
            answer["path"] = Path(answer.get("path", "/nowhere"))
        return [Answer(**answer) for answer in answers], done.stderr

    def load(self, name: str, **order) -> Answer:
        [answer], _ = self.load_all({"name": name, **order})
        return answer


def repositories() -> dict[str, dict[str, dict[str, bytes]]]:
    return {
        "us/model": {"main": NEW, "v1": OLD},
        "us/quants": {"main": QUANTS},
        "us/twice": {"main": TWICE},
        "us/pickles": {"main": {"config.json": b"{}", "pytorch_model.bin": b"x"}},
        "us/secret": {"main": OLD},
        "us/walled": {"main": OLD},
        "us/teapot": {"main": OLD},
        "us/forbidden": {"main": OLD},
    }


@pytest.fixture
def hub() -> Iterator[Hub]:
    faults = {"us/teapot": 418, "us/forbidden": 403}
    doors = {"private": {"us/secret": "hf_right"}, "gated": {"us/walled"}}
    with serving(Hub(repositories(), broken=faults, **doors)) as hub:
        yield hub


@pytest.fixture
def user(hub: Hub, tmp_path: Path) -> User:
    return User(tmp_path, hub.address)


def test_a_fresh_download_asks_for_what_is_needed_and_the_next_start_for_nothing(hub, user):
    [got], stderr = user.load_all({"name": "us/model"})
    assert (got.error, got.kind) == ("", "folder"), got.line
    assert got.files == NEEDED == hub.fetched()
    for name in NEEDED:
        assert (got.path / name).read_bytes() == NEW[name]
    assert len(got.logged) == 1 and "7 files" in got.logged[0] and hub.address in got.logged[0]
    assert "%" not in stderr, "a progress bar without a terminal"

    asked = len(hub.log)
    cached, offline, missing = user.load_all(
        {"name": "us/model"}, {"name": "us/model", "offline": True}, {"name": "us/model@v1", "offline": True}
    )[0]
    assert cached.path == offline.path == got.path and "from the cache" in cached.logged[0]
    assert missing.error == "HubError" and "mlxrt pull us/model@v1" in missing.line
    [cached, missing], _ = user.load_all({"name": "us/model"}, {"name": "us/quants:a.Q4_0.gguf"}, HF_HUB_OFFLINE="1")
    assert cached.path == got.path and missing.error == "HubError"
    assert len(hub.log) == asked


def test_pull_looks_for_a_newer_commit(hub, user):
    first = user.load("us/model")
    hub.repos["us/model"]["main"] = NEW | {"config.json": b'{"model_type": "qwen3"}'}
    hub.log.clear()
    before, pulled, after = user.load_all(
        {"name": "us/model"}, {"name": "us/model", "pull": True, "verify": True}, {"name": "us/model"}
    )[0]
    assert before.path == first.path != pulled.path == after.path
    assert (pulled.path / "config.json").read_bytes() == b'{"model_type": "qwen3"}'
    assert pulled.nbytes == sum(len(NEW[name]) for name in NEEDED)
    assert hub.fetched() == {"config.json"}, "an unchanged file was fetched again"


def test_a_cut_connection_is_resumed_where_it_broke(hub, user):
    """The library reads in pieces of 10 MiB and keeps whole ones: that much a cut may cost."""
    piece = 10 << 20
    big = bytes(range(256)) * (3 * piece // 256 + 5)
    hub.repos["us/big"] = {"main": {"config.json": b"{}", "model.safetensors": big}}
    hub.cuts["model.safetensors"] = [piece + 1_000_000, piece + 5]
    got = user.load("us/big")
    assert got.error == "", got.line
    assert (got.path / "model.safetensors").read_bytes() == big
    assert hub.ranges("model.safetensors") == ["", f"bytes={piece}-", f"bytes={2 * piece}-"]
    assert hub.served["model.safetensors"] == len(big) + 1_000_000 + 5


def test_after_a_failure_only_the_missing_files_are_fetched(hub, user):
    first, second = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    shards = {first: b"1" * 200_000, second: b"2" * 200_000}
    index = {"weight_map": {"w1": first, "w2": second}}
    hub.repos["us/shards"] = {
        "main": {"config.json": b"{}", "model.safetensors.index.json": json.dumps(index).encode(), **shards}
    }
    hub.lost[second] = 503
    failed, offline = user.load_all({"name": "us/shards"}, {"name": "us/shards", "offline": True})[0]
    assert failed.error == "HubError" and "503" in failed.line
    assert offline.error == "HubError", "half a model was taken for a whole one"
    hub.lost.clear()
    got = user.load("us/shards")
    assert {name: (got.path / name).read_bytes() for name in shards} == shards
    assert hub.served[first] == hub.served[second] == 200_000


def test_a_revision_in_the_name_or_beside_it(hub, user):
    commit = commit_of(OLD)
    named, given, by_commit = user.load_all(
        {"name": "us/model@v1"}, {"name": "us/model", "revision": "v1"}, {"name": f"us/model@{commit}", "offline": True}
    )[0]
    assert named.path == given.path == by_commit.path and named.path.name == commit
    assert named.files == set(OLD) and (named.path / "model.safetensors").read_bytes() == b"old weights"


def test_one_gguf_of_many(hub, user):
    four, eight, again = user.load_all(
        {"name": "us/quants:a.Q4_0.gguf"},
        {"name": "us/quants/sub/a.Q8_0.gguf"},
        {"name": "us/quants:a.Q4_0.gguf", "offline": True},
    )[0]
    assert four.kind == eight.kind == "gguf" and four.path == again.path
    assert (four.path.read_bytes(), eight.path.read_bytes()) == (b"GGUF four", b"GGUF eight")
    assert hub.fetched() == {"a.Q4_0.gguf", "a.Q8_0.gguf"}


def test_a_quantisation_names_its_file(hub, user):
    """In any case, in a folder, of several parts; the projector of a vision model is none."""
    hub.repos["us/quants"] = {"main": QUANTS | {"mmproj-a.Q4_0.gguf": b"GGUF no"} | SPLIT}
    four, eight, parts, again, offline, missing, *_, twice = user.load_all(
        {"name": "us/quants:Q4_0"},
        {"name": "us/quants@main:q8_0"},
        {"name": "us/quants:UD-Q2_K_XL"},
        {"name": "us/quants:q4_0"},
        {"name": "us/quants:Q4_0", "offline": True},
        {"name": "us/quants:Q6_K", "offline": True},
        {"name": "us/twice:a-Q4_0.gguf"},
        {"name": "us/twice:b-q4_0.gguf"},
        {"name": "us/twice:Q4_0", "offline": True},
    )[0]
    assert four.kind == eight.kind == parts.kind == "gguf" and four.path == again.path == offline.path
    assert (four.path.read_bytes(), eight.path.read_bytes()) == (b"GGUF four", b"GGUF eight")
    assert parts.path.name == "a-UD-Q2_K_XL-00001-of-00002.gguf" and missing.error == "HubError"
    assert hub.fetched() == {"a.Q4_0.gguf", "a.Q8_0.gguf", *SPLIT, *TWICE}
    assert "us/twice:Q4_0 is several files" in twice.line
    assert "us/quants:Q6_K is not in the cache" in missing.line


REFUSED = [
    ({"name": "us/nothing"}, "ModelNotFound", "no model us/nothing"),
    ({"name": "us/model@v9"}, "ModelNotFound", "revision"),
    ({"name": "us/secret"}, "HubError", "401"),
    ({"name": "us/secret", "token": "hf_wrong"}, "HubError", "401"),
    ({"name": "us/walled", "token": "hf_right"}, "HubError", "gated"),
    ({"name": "us/forbidden"}, "HubError", "403"),
    ({"name": "us/teapot"}, "HubError", "418"),
    ({"name": "us/quants"}, "ModelNotFound", "a.Q4_0.gguf"),
    ({"name": "us/quants:b.gguf"}, "ModelNotFound", "sub/a.Q8_0.gguf"),
    ({"name": "us/quants:Q5_K_M"}, "ModelNotFound", "no GGUF file of Q5_K_M; its GGUF files: a.Q4_0.gguf"),
    ({"name": "us/quants:Q4"}, "ModelNotFound", "no GGUF file of Q4"),
    ({"name": "us/twice:Q4_0"}, "ModelNotFound", "one as us/twice:FILE, FILE one of: a-Q4_0.gguf, b"),
    ({"name": "us/pickles"}, "UnsupportedModel", "pytorch_model.bin"),
    ({"name": "us/model@v1", "revision": "main"}, "BadRequest", "give one"),
    ({"name": "us/-model-"}, "ModelNotFound", "hub"),
]


def test_a_refusal_is_one_line_that_names_the_thing(hub, user):
    answers, _ = user.load_all(*(order for order, _, _ in REFUSED))
    for got, (order, error, part) in zip(answers, REFUSED, strict=True):
        assert (got.error, "\n" in got.line) == (error, False) and part in got.line, (order, got)
    assert not hub.fetched()


def test_a_private_model_opens_with_a_token(hub, user):
    assert user.load("us/secret", token="hf_right").files == set(OLD)
    other = User(user.home / "other", user.address)
    [got], _ = other.load_all({"name": "us/secret"}, HF_TOKEN="hf_right")
    assert got.files == set(OLD)


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
        [got], _ = user.load_all({"name": "us/model"}, HF_HUB_ETAG_TIMEOUT="1")
    assert got.error == "HubError" and "Timeout" in got.line and "\n" not in got.line


def test_a_host_that_does_not_exist(tmp_path):
    got = User(tmp_path, "http://hub.invalid").load("us/model")  # a reserved name: no resolver knows it
    assert got.error == "HubError" and "check the network" in got.line and "\n" not in got.line


@pytest.mark.parametrize("address", ["hub", "ftp://hub", "http://", "http://hub:port", "http://[::1", "http://hub:0"])
def test_an_address_that_is_none(monkeypatch, address):
    monkeypatch.setenv("HF_ENDPOINT", address)
    with pytest.raises(HubError, match="HF_ENDPOINT"):
        check_endpoint()


def test_an_address_that_is_one(monkeypatch):
    for address in ("https://hub", "http://127.0.0.1:8080", "https://hub/mirror"):
        monkeypatch.setenv("HF_ENDPOINT", address)
        check_endpoint()
    monkeypatch.delenv("HF_ENDPOINT")
    check_endpoint()


def test_verify_reads_every_byte_again(hub, user):
    got = user.load("us/model", pull=True, verify=True)
    assert got.error == "", got.line
    logged = capture_log()
    for name in ("model.safetensors", "config.json"):
        blob = (got.path / name).resolve()
        kept = blob.read_bytes()
        blob.write_bytes(b"X" + kept[1:])
        with pytest.raises(BadCheckpoint) as caught:
            verify(got.path)
        assert name in str(caught.value) and str(blob) in str(caught.value)
        blob.write_bytes(kept)
    verify(got.path)
    assert logged == []


def test_a_cache_that_cannot_be_written(hub, user):
    (user.home / "hf").write_text("a file where a folder should be")
    got = user.load("us/model")
    assert got.error == "HubError" and "\n" not in got.line and "HF_HOME" in got.line
