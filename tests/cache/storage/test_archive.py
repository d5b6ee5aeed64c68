"""Many named states in one folder, and states that are refused: by name, by field, by digest."""

import dataclasses
import json

import mlx.core as mx
import pytest

import mlxrt
from mlxrt import Engine, EngineConfig, Session
from mlxrt.cache.storage.archive import Archive
from mlxrt.cache.storage.checksummed import read_checksummed, read_verified_header, write_checksummed
from mlxrt.engine.core import Source
from mlxrt.text import Tokenizer
from tests.cli.conftest import write_tokenizer
from tests.support import toy_models as toy
from tests.support.oracle import next_prefix


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def llm():
    mx.random.seed(0)
    made = type("Toy", (toy.Toy,), {"kinds": "wf"})(
        dataclasses.replace(toy.CONFIG, vocab_size=258, num_hidden_layers=2)
    )
    made.fuse()
    mx.eval(made.parameters())
    return made


@pytest.fixture(scope="module")
def engine(llm, tokenizer):
    return Engine(llm, tokenizer=tokenizer, source=Source("toy"))


def start_session(engine, text):
    session = engine.session()
    session.say(text, max_tokens=4).text  # noqa: B018
    return session


@pytest.fixture
def two(engine, tmp_path):
    """An archive of two."""
    sessions = {name: start_session(engine, f"about {name}") for name in ("tea", "the sea")}
    for name, session in sessions.items():
        session.save(tmp_path / "archive", name)
    return tmp_path / "archive", sessions


def test_states_by_name(engine, llm, tokenizer, two):
    path, sessions = two
    other = Engine(llm, tokenizer=tokenizer)
    for name, session in sessions.items():
        restored = Session.restore(other, path, name)
        assert restored.turns == session.turns
        done = restored.say("more", max_tokens=4).completion
        assert done.cached_tokens == next_prefix(tokenizer, session.messages)
        assert done.tokens == session.fork().say("more", max_tokens=4).completion.tokens
    entries = Archive(path).entries()
    assert list(entries) == ["tea", "the sea"] and entries["tea"].model == "toy"
    assert entries["tea"].tokens == next_prefix(tokenizer, sessions["tea"].messages)


def test_the_only_state_needs_no_name(engine, tmp_path):
    session = start_session(engine, "one")
    session.save(tmp_path / "archive", "only")
    assert Session.restore(engine, tmp_path / "archive").turns == session.turns


def test_the_same_name_is_replaced(engine, two):
    path, sessions = two
    newer = start_session(engine, "about something else")
    newer.save(path, "tea")
    assert Session.restore(engine, path, "tea").turns == newer.turns
    assert Session.restore(engine, path, "the sea").turns == sessions["the sea"].turns
    assert len(list(path.glob("*.state"))) == 2


def test_which_one(engine, two, tmp_path):
    path, sessions = two
    with pytest.raises(mlxrt.BadRequest, match="holds 2 states: tea, the sea"):
        Session.restore(engine, path)
    with pytest.raises(mlxrt.BadSnapshot, match="no state 'coffee'; there are: tea, the sea"):
        Session.restore(engine, path, "coffee")
    with pytest.raises(mlxrt.BadRequest, match="give the state a name"):
        sessions["tea"].save(path)
    for name in ("", "a\nb", "x" * 201, 3):
        with pytest.raises(mlxrt.BadRequest, match="name"):
            sessions["tea"].save(path, name)
    (tmp_path / "empty").mkdir()
    with pytest.raises(mlxrt.BadSnapshot, match="no saved states"):
        Session.restore(engine, tmp_path / "empty")
    sessions["tea"].save(tmp_path / "single")
    with pytest.raises(mlxrt.BadRequest, match="one saved state"):
        Session.restore(engine, tmp_path / "single", "tea")
    with pytest.raises(mlxrt.BadRequest, match="one saved state"):
        sessions["tea"].save(tmp_path / "single", "tea")


def test_an_index_that_points_elsewhere(engine, two):
    path, _ = two
    entries = Archive(path).entries()
    tea, sea = (path / entries[name].file for name in ("tea", "the sea"))
    good = tea.read_bytes()
    tea.write_bytes(sea.read_bytes())  # sound in itself
    with pytest.raises(mlxrt.BadSnapshot, match=f"{tea.name} is another file"):
        Session.restore(engine, path, "tea")
    tea.unlink()
    with pytest.raises(mlxrt.BadSnapshot, match=f"names {tea.name} for 'tea'"):
        Session.restore(engine, path, "tea")
    tea.write_bytes(good)
    assert Session.restore(engine, path, "tea").tokens


STATE = {"file": f"{'a' * 32}.state", "sha256": "x", "tokens": 1, "model": "", "created": ""}


@pytest.mark.parametrize(
    "index",
    [
        b"",
        b"[]",
        b"\xff",
        b"{" * 9999,
        b'{"a": 1, "a": 1}',
        json.dumps({"mlxrt": "bundle", "format": "9", "states": {}}).encode(),
        json.dumps({"mlxrt": "bundle", "format": "1", "states": []}).encode(),
        json.dumps({"mlxrt": "bundle", "format": "1", "states": {"tea": 3}}).encode(),
        json.dumps({"mlxrt": "bundle", "format": "1", "states": {"tea": STATE | {"tokens": "1"}}}).encode(),
        json.dumps({"mlxrt": "bundle", "format": "1", "states": {"tea": STATE | {"file": "../secret.state"}}}).encode(),
        json.dumps({"weight_map": {}}).encode(),
    ],
)
def test_bad_indices_are_refused_and_left_alone(engine, two, index):
    path, sessions = two
    (path / "index.json").write_bytes(index)
    files = sorted(path.glob("*.state"))
    for call in (lambda: Session.restore(engine, path, "tea"), lambda: sessions["tea"].save(path, "tea")):
        with pytest.raises(mlxrt.BadSnapshot, match=r"index\.json"):
            call()
    assert (path / "index.json").read_bytes() == index and sorted(path.glob("*.state")) == files


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "prefix"},
        {"tokens": []},
        {"tokens": "abc"},
        {"tokens": [1.5]},
        {"tokens": [-1]},
        {"tokens": None},
        {"parts": None},
        {"parts": [{}]},
        {"parts": [{"first": "0"}, {"first": 0}]},
        {"parts": [{"first": 0}, {"last": 0}]},
        {"identity": []},
        {"identity": {}},
        {"extra": None},
        {"extra": {}},
        {"extra": {"turns": []}},
        {"extra": {"turns": [3]}},
        {"extra": {"turns": [{"messages": [], "tokens": [258], "prompt": "", "end": ""}]}},
        {"extra": {"turns": [{"messages": [1], "tokens": [], "prompt": "", "end": ""}]}},
    ],
)
def test_states_whose_digest_is_right_and_whose_content_is_not(engine, tmp_path, change):
    path = tmp_path / "state"
    start_session(engine, "hello").save(path)
    saved = read_checksummed(path)
    used = engine.stats().kv_bytes
    write_checksummed(path, saved.header | change, saved.arrays)
    with pytest.raises(mlxrt.BadSnapshot, match="state"):
        Session.restore(engine, path)
    for name in list(saved.arrays)[:2]:
        write_checksummed(path, saved.header, saved.arrays | {name: saved.arrays[name][:, :1]})
        with pytest.raises(mlxrt.BadSnapshot, match="layer"):
            Session.restore(engine, path)
        write_checksummed(path, saved.header, {k: v for k, v in saved.arrays.items() if k != name})
        with pytest.raises(mlxrt.BadSnapshot, match="layer"):
            Session.restore(engine, path)
    assert engine.stats().kv_bytes == used


def test_refusals_name_the_field(engine, llm, tokenizer, tmp_path):
    path = tmp_path / "state"
    start_session(engine, "hello").save(path)
    with pytest.raises(mlxrt.BadSnapshot, match="another cache"):
        Session.restore(Engine(llm, EngineConfig(kv="q8"), tokenizer), path)
    with pytest.raises(mlxrt.BadSnapshot, match="another tokenizer"):
        folder = tmp_path / "words"
        folder.mkdir()
        write_tokenizer(folder, template="{{ messages[-1].content }}")
        Session.restore(Engine(llm, tokenizer=Tokenizer.from_folder(folder)), path)
    saved = read_checksummed(path)
    for field in saved.header["identity"]:
        other = saved.header | {"identity": saved.header["identity"] | {field: "other"}}
        write_checksummed(path, other, saved.arrays)
        with pytest.raises(mlxrt.BadSnapshot, match=f"another {field}"):
            Session.restore(engine, path)
    fields = {"weights", "adapter", "arithmetic", "tokenizer", "cache", "block", "dtype", "activations", "format"}
    assert fields == set(saved.header["identity"])


def test_every_byte_counts(engine, tmp_path):
    """One flipped bit anywhere, the padding of the header included, is noticed."""
    path = tmp_path / "state"
    write_checksummed(path, {"kind": "x"}, {"a": mx.arange(3)})
    good = path.read_bytes()
    assert read_verified_header(path)[1] == {"kind": "x"}
    for at in range(len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ (1 << at % 8)]) + good[at + 1 :])
        with pytest.raises(mlxrt.BadSnapshot):
            read_verified_header(path)
    for at in range(len(good)):
        path.write_bytes(good[:at])
        with pytest.raises(mlxrt.BadSnapshot):
            read_verified_header(path)


def test_restoring_evicts_cached_prefixes(llm, tokenizer, engine, tmp_path):
    path = tmp_path / "state"
    session = start_session(engine, "a long question " * 8)
    session.save(path)
    block_bytes = sum(s.nbytes() for s in llm.cache_specs())
    small = Engine(llm, EngineConfig(kv_memory=60 * block_bytes), tokenizer)
    for i in range(3):
        small.generate(f"{i} fills the pool with something else, and more of it, and more", max_tokens=3)
    assert Session.restore(small, path).say("more", max_tokens=3).completion.cached_tokens == next_prefix(
        tokenizer, session.messages
    )
    tiny = Engine(llm, EngineConfig(kv_memory=20 * block_bytes), tokenizer)
    with pytest.raises(mlxrt.WontFit, match="blocks"):
        Session.restore(tiny, path)
    assert tiny.stats().kv_bytes == 0
