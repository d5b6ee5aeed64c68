"""Sessions whose context is full, with tools in their history; options of the chat template."""

import asyncio
from types import SimpleNamespace

import pytest

from mlxrt import AsyncEngine, BadRequest, ContextOverflow, Request, Session
from mlxrt.engine.overflow import SUMMARY_HEAD
from mlxrt.text.builtin_templates import HARMONY

from .test_reasoning import ASK, FAMILIES, GPT_OSS, TOOLS, make_engine, write

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 3}}\n</tool_call>'


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    with make_engine(tmp_path_factory.mktemp("tokenizer"), "qwen3", FAMILIES["qwen3"], max_context=256) as engine:
        yield engine


def converse_past_the_end(engine, policy: str, turns: int) -> tuple[Session, list[str]]:
    """A conversation that is longer than the context, and what its answers noted."""
    session, notes = engine.session("Be brief.", on_overflow=policy, cache_salt="a"), []
    for i in range(turns):
        events = list(session.say(f"This is question {i}.", **write(f"Answer {i}.", engine)))
        notes += [event.note for event in events if event.note]
        assert session.messages[0]["role"] == "system" and session.messages[0]["content"].startswith("Be brief.")
        assert session.messages[-1]["content"] == f"Answer {i}." and len(session.tokens) <= engine.context
    assert notes and all("to fit the context" in note for note in notes)
    return session, notes


def test_the_oldest_turns_are_dropped(engine):
    session, notes = converse_past_the_end(engine, "drop-oldest", 8)
    assert not session.summary and all("dropped" in note for note in notes)


@pytest.mark.parametrize(
    "summary, noted", [("Cats.", "replaced by a summary"), ("", "was empty"), ("long " * 80, "was longer than")]
)
def test_a_summary_replaces_the_oldest_turns(tmp_path, monkeypatch, summary, noted):
    with make_engine(tmp_path, "qwen3", FAMILIES["qwen3"], max_context=512) as engine:
        asked = []

        def generate(request: Request) -> SimpleNamespace:
            asked.append(request.messages)
            assert request.cache_salt == "a"  # as the conversation's: it begins with its turns
            return SimpleNamespace(text=summary)

        monkeypatch.setattr(engine, "generate", generate)
        session, notes = converse_past_the_end(engine, "summarize", 14)
        assert all(noted in note for note in notes)
        assert session.summary == (summary if noted.startswith("replaced") else "")
        assert (f"Be brief.\n\n{SUMMARY_HEAD}Cats." == session.messages[0]["content"]) == bool(session.summary)
        if session.summary:
            assert len(asked) > 1 and "Cats." in asked[1][0]["content"]  # the next one is made of it
            assert session.fork().summary == "Cats."


def test_an_error_names_the_numbers(engine):
    session = engine.session()
    session.say("a" * 100, **write("Yes.", engine)).completion  # noqa: B018  an answer is computed when it is read
    with pytest.raises(ContextOverflow, match="256"):
        session.say("b" * 200)
    assert len(session.messages) == 2


def test_async_sessions_summarize_too(tmp_path):
    async def converse(engine: AsyncEngine) -> list[str]:
        session, answers = engine.session(on_overflow="summarize"), []
        for i in range(5):
            reply = await session.say(f"This is question {i}, which is long." * 2, max_tokens=8)
            answers.append(await reply.text())
        return answers

    with make_engine(tmp_path, "qwen3", FAMILIES["qwen3"], max_context=256) as inner:

        async def run() -> list[str]:
            async with AsyncEngine(inner) as engine:
                return await asyncio.wait_for(converse(engine), 60)

        assert len(asyncio.run(run())) == 5


def test_a_dropped_call_takes_its_result_along(engine):
    session = engine.session(on_overflow="drop-oldest", tools=TOOLS)
    [call] = session.say("Hi", **write(CALL, engine)).completion.tool_calls
    session.say({"role": "tool", "tool_call_id": call.id, "content": "9"}, **write("Nine.", engine)).completion  # noqa: B018
    for i in range(4):
        session.say(f"Question {i}?", **write("Yes.", engine)).completion  # noqa: B018
    roles = [message["role"] for message in session.messages]
    assert roles[0] == "user" and "tool" not in roles


def test_a_conversation_with_calls_is_saved(engine, tmp_path):
    session = engine.session(tools=TOOLS)
    session.say("Hi", **write(f"<think>\nHm.\n</think>\n\n{CALL}", engine)).completion  # noqa: B018
    session.save(tmp_path / "session.safetensors")
    again = Session.restore(engine, tmp_path / "session.safetensors", tools=TOOLS)
    assert again.messages == session.messages and again.messages[-1]["reasoning_content"] == "Hm."
    result = {"role": "tool", "tool_call_id": again.messages[-1]["tool_calls"][0]["id"], "content": "9"}
    done = again.say(result, **write("Nine.", engine)).completion
    assert done.text == "Nine." and done.cached_tokens > 0


def test_thinking_is_the_templates_switch(engine):
    def render(**options) -> str:
        return engine.tokenizer.decode(list(engine.encode(Request.of(list(ASK), **options))), skip_special=False)

    assert render(thinking="off") == render(enable_thinking=False) != render()
    assert render(thinking="off").endswith("<think>\n\n</think>\n\n")
    assert render(thinking="on") == render(template_options={"enable_thinking": True})


def test_reasoning_effort_and_models_that_always_think(tmp_path):
    assert "reasoning_effort" in HARMONY
    with make_engine(tmp_path, "gpt_oss", GPT_OSS) as engine:
        request = Request.of(list(ASK), template_options={"reasoning_effort": "high"})
        assert "Reasoning: high" in engine.tokenizer.decode(list(engine.encode(request)))
        with pytest.raises(BadRequest, match="always thinks"):
            engine.generate(list(ASK), thinking="off")
        done = engine.generate(list(ASK), max_tokens=30, thinking_budget=4, ignore_eos=True, **write_open(engine))
        assert done.timings.reasoning_tokens == 4


def write_open(engine) -> dict:
    """A callback that opens the analysis channel and goes on in it."""
    start = engine.tokenizer.encode("<|channel|>analysis<|message|>", special=False)
    thought = engine.tokenizer.encode("a", special=False)[0]

    def force(row) -> None:
        written = len(row.output_tokens)
        row.add({start[written] if written < len(start) else thought: 1e6})

    return {"on_logits": force}
