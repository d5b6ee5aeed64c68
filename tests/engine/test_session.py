"""Conversations: every answer is that of a fresh run on the same tokens, and nothing that was computed is lost."""

import dataclasses

import mlx.core as mx
import pytest

import mlxrt
from mlxrt import Engine, EngineConfig, Session
from mlxrt.text import Tokenizer
from tests.cli.conftest import write_tokenizer
from tests.support import toy_models as toy
from tests.support.oracle import common_prefix, next_prefix, truth


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Tokenizer.from_folder(folder)


def model(kinds="wf", seed=0):
    mx.random.seed(seed)
    config = dataclasses.replace(toy.CONFIG, vocab_size=258)
    made = type("Toy", (toy.Toy,), {"kinds": kinds})(config)
    made.fuse()
    mx.eval(made.parameters())
    return made


@pytest.fixture(scope="module")
def llm():
    return model()


@pytest.fixture
def engine(llm, tokenizer):
    return Engine(llm, tokenizer=tokenizer)


def answers(session, *messages, n=12):
    return [session.say(t, max_tokens=n).completion for t in messages]


def check_conversation(engine, session, sent, **options):
    """Every turn is fed its messages rendered anew, answers as a fresh run does, and reuses what still agrees."""
    fresh = Engine(engine.model, EngineConfig(prefix_cache=False), engine.tokenizer)
    for text in sent:
        asked = [*session.messages, {"role": "user", "content": text}]
        rendered, ran = tuple(engine.tokenizer.chat(asked)), session.tokens
        done = session.say(text, **options).completion
        assert session.tokens == rendered + done.tokens
        assert list(session.messages) == [*asked, {"role": "assistant", "content": done.text}]
        assert done.tokens == fresh.generate(asked, **options).tokens
        same = min(common_prefix(rendered, ran), max(len(ran) - 1, 0))  # the last token was never run
        assert done.cached_tokens >= same - same % engine.core.node_size


def test_a_turn_is_fed_what_the_messages_hold(engine):
    session = engine.session("be kind")
    check_conversation(engine, session, ("hello", "and you?", "bye"), max_tokens=12)
    assert [m["role"] for m in session.messages] == ["system"] + ["user", "assistant"] * 3


def test_what_a_stop_string_cut_off_is_not_fed_again(engine):
    free = engine.session().say("hello", max_tokens=30).text
    check_conversation(engine, engine.session(), ("hello", "x", "y"), max_tokens=30, stop=free[6:8])


def test_the_end_of_an_answer_is_fed_once(engine):
    """Whether the model writes the template's end token, or the caller names another token as an end."""
    end = 257  # <|end|>, which the template writes after every message
    session = engine.session()
    check_conversation(engine, session, ("hello", "x", "y"), max_tokens=9, logit_bias={end: 1e4}, stop_token_ids=(end,))
    assert session.tokens.count(end) == 3 * 2  # three questions, two answers in the prompt and the last one's own
    first = session.say("more", max_tokens=9).completion.tokens
    session.rewind()
    check_conversation(engine, session, ("more", "z"), max_tokens=9, stop_token_ids=(first[3],))


def test_rewind_forgets_and_the_rest_is_reused(llm, engine):
    session = engine.session()
    answers(session, "one", "two")
    kept = session.tokens
    answers(session, "three")
    session.rewind()
    assert session.tokens == kept
    done = session.say("four", max_tokens=8).completion
    same = common_prefix(kept, session.tokens)
    assert done.cached_tokens >= same - same % engine.core.node_size
    assert done.tokens == truth(llm, session.tokens[:-8], 8)
    session.rewind(3)
    assert session.tokens == () and session.messages == ()
    with pytest.raises(mlxrt.BadRequest, match="has 0"):
        session.rewind()


def test_forks_go_their_own_ways(llm, engine):
    session = engine.session()
    answers(session, "one")
    other = session.fork()
    [a], [b] = answers(session, "left"), answers(other, "right, much longer than left")
    assert a.cached_tokens and b.cached_tokens
    assert a.tokens == truth(llm, session.tokens[:-12], 12) and b.tokens == truth(llm, other.tokens[:-12], 12)
    assert len(session.turns) == len(other.turns) == 3


def test_an_answer_closed_early_leaves_the_session_as_it_was(engine):
    session = engine.session()
    answers(session, "one")
    before = list(session.turns)
    reply = session.say("two", max_tokens=50)
    next(reply)
    reply.close()
    with pytest.raises(mlxrt.BadRequest, match="has no end"):
        reply.text  # noqa: B018
    assert session.turns == before
    assert answers(session, "three")[0].finish_reason == "length"


def test_an_error_leaves_the_session_as_it_was(engine):
    session = engine.session()
    answers(session, "one")
    before = list(session.turns)

    def fail(row):
        raise RuntimeError("mine")

    reply = session.say("two", on_logits=fail)
    with pytest.raises(RuntimeError, match="mine"):
        reply.text  # noqa: B018
    with pytest.raises(mlxrt.BadRequest, match="has no end"):
        reply.text  # noqa: B018
    with pytest.raises(mlxrt.ContextOverflow):
        session.say("x" * 5000)
    assert session.turns == before


def test_save_and_restore_in_another_process_of_the_same_model(llm, engine, tokenizer, tmp_path):
    session = engine.session("be kind")
    answers(session, "one", "two")
    session.save(tmp_path / "state.any")
    other = Engine(llm, tokenizer=tokenizer)
    restored = Session.restore(other, tmp_path / "state.any")
    assert restored.messages == session.messages and restored.tokens == session.tokens
    [a], [b] = answers(session, "three"), answers(restored, "three")
    assert a.tokens == b.tokens == truth(llm, restored.tokens[:-12], 12)
    assert b.cached_tokens == next_prefix(tokenizer, restored.turns[2].messages)
    assert list(tmp_path.iterdir()) == [tmp_path / "state.any"]


def test_a_restored_state_is_refused_by_another_model(llm, engine, tokenizer, tmp_path):
    session = engine.session()
    answers(session, "one")
    path = tmp_path / "state"
    session.save(path)
    with pytest.raises(mlxrt.BadSnapshot, match="another weights"):
        Session.restore(Engine(model(seed=5), tokenizer=tokenizer), path)
    with pytest.raises(mlxrt.BadSnapshot, match="another cache"):
        narrow = type("Narrow", (type(llm),), {"window": 5})
        other = narrow(llm.config)
        other.fuse()
        other.update(llm.parameters())
        Session.restore(Engine(other, tokenizer=tokenizer), path)


def test_damaged_states_are_refused(engine, tmp_path):
    session = engine.session()
    answers(session, "one")
    path = tmp_path / "state"
    session.save(path)
    good = path.read_bytes()
    used = engine.stats().kv_bytes
    for at in [3, 20, 200, len(good) // 2, len(good) - 5]:
        path.write_bytes(good[:at] + bytes([good[at] ^ 0x41]) + good[at + 1 :])
        with pytest.raises(mlxrt.MlxrtError):
            Session.restore(engine, path)
    path.write_bytes(good[:-100])
    with pytest.raises(mlxrt.MlxrtError):
        Session.restore(engine, path)
    with pytest.raises(mlxrt.BadSnapshot, match="no saved state"):
        Session.restore(engine, tmp_path / "absent")
    assert engine.stats().kv_bytes == used


def test_a_conversation_the_store_has_let_go_can_still_be_saved(llm, engine, tokenizer, tmp_path):
    session = engine.session("be kind")
    answers(session, "one", "two")
    engine.core.prefix_cache.clear()
    session.save(tmp_path / "state")
    restored = Session.restore(Engine(llm, tokenizer=tokenizer), tmp_path / "state")
    [done] = answers(restored, "three")
    assert done.cached_tokens == next_prefix(tokenizer, session.messages)
    assert done.tokens == truth(llm, restored.tokens[:-12], 12)


def test_a_saved_conversation_stays_with_its_cache_salt(llm, engine, tokenizer, tmp_path):
    """Found by requests with the same salt and by no other, where it was saved and where it is restored."""
    session = engine.session("be kind", cache_salt="a")
    answers(session, "one", "two")
    engine.core.prefix_cache.clear()
    session.save(tmp_path / "state")  # which computes it again
    other = Engine(llm, tokenizer=tokenizer)
    restored = Session.restore(other, tmp_path / "state", cache_salt="a")
    asked = [*restored.messages, {"role": "user", "content": "three"}]
    for one in (engine, other):
        for salt in ("", "b", "a"):
            done = one.generate(asked, max_tokens=4, cache_salt=salt)
            assert done.cached_tokens == (next_prefix(tokenizer, session.messages) if salt == "a" else 0), salt
            assert done.tokens == truth(llm, tuple(tokenizer.chat(asked)), 4)


def test_a_salt_given_to_one_answer_is_that_of_what_is_saved_after_it(engine, tokenizer, tmp_path):
    session = engine.session("be kind")
    session.say("one", max_tokens=12, cache_salt="a").completion  # noqa: B018  runs it
    engine.core.prefix_cache.clear()
    session.fork().save(tmp_path / "state")
    asked = [*session.messages, {"role": "user", "content": "two"}]
    for salt, found in (("", 0), ("a", next_prefix(tokenizer, session.messages))):
        assert engine.generate(asked, max_tokens=1, cache_salt=salt).cached_tokens == found


def test_a_rewound_conversation_has_the_salt_of_the_answer_it_goes_back_to(engine, tokenizer, tmp_path):
    session = engine.session("be kind")
    for text, salt in (("one", "a"), ("two", "b")):
        session.say(text, max_tokens=12, cache_salt=salt).completion  # noqa: B018  runs it
    session.rewind()
    engine.core.prefix_cache.clear()
    session.save(tmp_path / "state")
    asked = [*session.messages, {"role": "user", "content": "three"}]
    for salt, found in (("", 0), ("b", 0), ("a", next_prefix(tokenizer, session.messages))):
        assert engine.generate(asked, max_tokens=1, cache_salt=salt).cached_tokens == found


def test_nothing_to_save(engine, llm, tokenizer, tmp_path):
    with pytest.raises(mlxrt.BadSnapshot):
        engine.session().save(tmp_path / "x")
    without = Engine(llm, EngineConfig(prefix_cache=False), tokenizer)
    session = without.session()
    answers(session, "one")
    with pytest.raises(mlxrt.BadSnapshot):
        session.save(tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_stop_strings_end_an_answer_and_are_not_shown(engine):
    free = engine.generate("hello there", max_tokens=30)
    for stop in (free.text[5:8], free.text[10]):
        done = engine.generate("hello there", max_tokens=30, stop=stop)
        assert done.finish_reason == "stop" and done.text == free.text[: free.text.index(stop)]
        streamed = "".join(e.text for e in engine.stream("hello there", max_tokens=30, stop=stop))
        assert streamed == done.text


def test_a_stop_string_that_ends_with_the_last_token_allowed_is_counted_as_stop(engine):
    free = engine.generate("hello there", max_tokens=30)
    before, stop = dict(engine.stats().finished), free.text[-2:]
    last = next(n for n in range(1, 31) if stop in engine.tokenizer.decode(list(free.tokens[:n])))
    done = engine.generate("hello there", max_tokens=last, stop=stop)
    after = engine.stats().finished
    assert len(done.tokens) == last and done.finish_reason == "stop" and done.stop_string == stop
    assert after["stop"] == before.get("stop", 0) + 1 and after["length"] == before["length"]


def test_text_of_a_stream_is_the_text_of_its_tokens(engine, tokenizer):
    done = engine.generate("abc", max_tokens=60, temperature=1.5, seed=4)
    assert done.text == tokenizer.decode(list(done.tokens))


def test_messages_go_through_the_template(engine, tokenizer):
    messages = [{"role": "user", "content": "hi"}]
    a = engine.generate(messages, max_tokens=5)
    b = engine.generate(tokenizer.chat(messages), max_tokens=5)
    assert a.tokens == b.tokens


@pytest.mark.parametrize("messages", [[{"content": "x"}], [{"role": 3, "content": "x"}], [{}]])
def test_bad_messages(engine, messages):
    with pytest.raises(mlxrt.MlxrtError):
        engine.generate(messages)


@pytest.mark.parametrize("read", [0, 1, 5])
def test_a_stopped_answer_is_kept_as_far_as_it_came(engine, read):
    session = engine.session(max_tokens=40, ignore_eos=True)
    session.say("hello").text  # noqa: B018  waits for it
    before = session.turns
    reply = session.say("again")
    for _ in range(read):
        next(reply)
    reply.stop()
    done = reply.completion
    assert done.finish_reason == "cancelled" and read <= len(done.tokens) < 40
    if not done.tokens:
        assert session.turns is before
    else:
        assert session.messages[-1] == {"role": "assistant", "content": done.text}
        check_conversation(engine, session, ["go on"], max_tokens=5)


def test_stopping_an_answer_that_has_ended_changes_nothing(engine):
    session = engine.session(max_tokens=4)
    reply = session.say("hello")
    done = reply.completion
    reply.stop()
    assert reply.completion == done and session.messages[-1]["content"] == done.text
