"""A conversation that outgrows the context: refused and left as it was, or shortened, said so, and exact."""

import dataclasses

import mlx.core as mx
import pytest

import mlxrt
from mlxrt import Engine, EngineConfig
from mlxrt.text import Tokenizer
from tests.cli.conftest import write_tokenizer
from tests.support import toy_models as toy
from tests.support.oracle import truth

CONTEXT = 160


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    mx.random.seed(0)
    made = type("Toy", (toy.Toy,), {"kinds": "wf"})(
        dataclasses.replace(toy.CONFIG, vocab_size=258, num_hidden_layers=2)
    )
    made.fuse()
    return Engine(made, EngineConfig(max_context=CONTEXT), Tokenizer.from_folder(folder))


def test_error_leaves_the_session_as_it_was(engine):
    session = engine.session("short", max_tokens=4)
    session.say("one").text  # noqa: B018
    before = list(session.turns)
    with pytest.raises(mlxrt.ContextOverflow) as caught:
        session.say("x" * CONTEXT)
    assert caught.value.limit == CONTEXT and caught.value.prompt > CONTEXT
    assert session.turns == before
    assert session.say("two").completion.cached_tokens >= len(before[-1].tokens) - 1


def test_drop_oldest_says_so_and_is_exact(engine):
    session = engine.session("be kind", on_overflow="drop-oldest", max_tokens=4)
    dropped = 0
    for i in range(9):
        messages = session.messages
        reply = session.say(f"question {i}")
        events = list(reply)
        gone = reply.dropped_turns
        dropped += gone
        assert bool(events[0].note) == bool(gone) and not any(e.note for e in events[1:])
        assert ("oldest" in events[0].note) == bool(gone)
        kept = [messages[0], *messages[1 + 2 * gone :], {"role": "user", "content": f"question {i}"}]
        assert list(session.messages[:-1]) == kept and session.messages[0]["content"] == "be kind"
        tokens = tuple(e.token for e in events)
        prompt = session.tokens[: -len(tokens)]
        assert tokens == truth(engine.model, prompt, len(tokens)) and len(prompt) + 4 <= CONTEXT
        if gone:
            assert list(prompt) == engine.tokenizer.chat(kept)
            assert tokens == engine.generate(kept, max_tokens=4).tokens
    assert dropped >= 4


def test_what_stays_can_be_rewound_forked_and_saved(engine, tmp_path):
    session = engine.session(on_overflow="drop-oldest", max_tokens=4)
    dropped = 0
    while not dropped:
        reply = session.say("question")
        reply.text  # noqa: B018
        dropped = reply.dropped_turns
    kept = session.messages
    other = session.fork()
    assert other.on_overflow == "drop-oldest"
    session.save(tmp_path / "state")
    restored = mlxrt.Session.restore(engine, tmp_path / "state", on_overflow="drop-oldest")
    assert restored.messages == kept
    session.rewind()
    assert session.messages == kept[:-2] and len(session.messages) >= 2
    done = session.say("another")
    assert done.completion.tokens == truth(engine.model, session.tokens[: -len(done.completion.tokens)], 4)


def test_closed_early_nothing_is_dropped(engine):
    session = engine.session(on_overflow="drop-oldest", max_tokens=4)
    while True:
        before = list(session.turns)
        reply = session.say("question")
        if reply.dropped_turns:
            next(reply)
            reply.close()
            break
        reply.text  # noqa: B018
    assert session.turns == before


def test_a_question_too_long_for_any_dropping(engine):
    session = engine.session("x" * 20, on_overflow="drop-oldest", max_tokens=4)
    session.say("one").text  # noqa: B018
    before = list(session.turns)
    with pytest.raises(mlxrt.ContextOverflow):
        session.say("x" * CONTEXT)
    assert session.turns == before
    done = session.say("y" * (CONTEXT - 80))  # needs nearly all of it
    assert done.completion.finish_reason in ("length", "stop")
    with pytest.raises(mlxrt.BadRequest, match="on_overflow"):
        engine.session(on_overflow="forget")
