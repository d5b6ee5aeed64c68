"""The public calls as an editor and a type checker see them: every option by name and type, and nothing else."""

import inspect
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest

import mlxrt
from mlxrt import BadRequest, Engine, EngineConfig, Request, SamplingParams
from mlxrt.engine.async_engine import AsyncEngine, AsyncSession
from mlxrt.engine.async_stream import AsyncReply
from mlxrt.engine.options import EngineOptions, GenerateOptions
from mlxrt.engine.output import RequestStream
from mlxrt.engine.session import Reply, Session
from tests.support.api_page import CLASSES
from tests.support.state_machine.kinds import model as spoken
from tests.support.state_machine.kinds import tokenizer
from tests.support.tiny_files import float_weights, write_folder
from tests.support.toy_models import make

TYPED_CALLS = Path(__file__).parents[1] / "support" / "typed_calls.py"
SHORT = SamplingParams(max_tokens=5)
INPUTS = {"prompt", "tokens", "messages", "params"}

TYPOS = """
engine.generate("hi", max_tokns=3)
engine.generate("hi", temperature="hot")
engine.generate("hi", stop=3)
engine.generate(3)
engine.generate(["hi"]).text
engine.stream("hi", topk=3)
engine.session(sytem="x")
engine.session().say("hi", max_tokens="many")
mlxrt.load("smollm2", kvs="q8")
mlxrt.load("smollm2", max_running="all")
mlxrt.SamplingParams(temprature=1.0)
engine.generate("hi").txt
engine.generate("hi", on_logits=lambda row: row.edits(row))
"""


def test_options_are_the_fields_of_the_dataclasses():
    """A field added to one of them has to be added to mlxrt/engine/options.py, where editors find it."""
    wanted = {f.name for f in fields(SamplingParams)} | {f.name for f in fields(Request)} - INPUTS
    assert set(get_type_hints(GenerateOptions)) == wanted
    assert set(get_type_hints(EngineOptions)) == {f.name for f in fields(EngineConfig)}


@pytest.mark.parametrize(
    "call", [Engine.generate, Engine.stream, Engine.session, Session.say, AsyncEngine.generate, AsyncSession.say]
)
def test_help_lists_every_option(call):
    assert set(get_type_hints(GenerateOptions)) <= set(inspect.signature(call).parameters)


def test_help_lists_the_options_of_load():
    assert set(get_type_hints(EngineOptions)) <= set(inspect.signature(mlxrt.load).parameters)


def test_help_shows_the_defaults():
    assert "max_tokens: int = 256, temperature: float = 0.0" in str(inspect.signature(Engine.generate))
    assert "kv: str = 'full'" in str(inspect.signature(mlxrt.load))


@pytest.mark.parametrize(
    "inputs",
    [
        ["ab", "ba ab", "b"],
        ("b", "ab"),
        [[1, 2, 3], [2]],
        [Request(tokens=(1,), params=SHORT), Request(prompt="ab", params=SHORT)],
    ],
)
def test_a_list_of_inputs_is_several_prompts(inputs):
    options = {} if any(isinstance(x, Request) for x in inputs) else {"max_tokens": 5}
    with Engine(spoken("full"), tokenizer=tokenizer()) as engine:
        alone = [engine.generate(x, **options) for x in inputs]
        assert [c.tokens for c in engine.generate(inputs, **options)] == [c.tokens for c in alone]


@pytest.mark.parametrize(
    ("x", "line"),
    [
        (b"hello", "cannot generate from bytes; give a str"),
        (bytearray(b"hello"), "cannot generate from bytearray; give a str"),
        (3, "cannot generate from int"),
        ({"role": "user", "content": "hi"}, r"messages come as a list: give \[message\]"),
        (["hi", 3], "cannot generate from list of str"),
        ([b"hi"], "cannot generate from list of bytes"),
        ([], "the tokens is empty"),
    ],
)
def test_what_is_no_prompt_is_refused_by_its_type(x, line):
    with Engine(spoken("full"), tokenizer=tokenizer()) as engine, pytest.raises(BadRequest, match=line):
        engine.generate(x, max_tokens=3)


@pytest.mark.parametrize(
    "fields", [{"prompt": b"hi"}, {"tokens": "hi"}, {"tokens": b"hi"}, {"messages": {"role": "user"}}]
)
def test_a_request_refuses_fields_of_another_type(fields):
    with pytest.raises(BadRequest, match=r"must be a (str|list of token ids|list of dicts), not (str|bytes|dict)"):
        Request(**fields)


def test_load_takes_the_fields_of_its_config(tmp_path):
    folder = str(write_folder(tmp_path / "model", float_weights()))
    with mlxrt.load(folder, EngineConfig(max_context=40, kv="q4"), kv="q8") as engine:
        assert (engine.config.kv, engine.config.max_context) == ("q8", 40)
    with pytest.raises(BadRequest, match="unknown option kvs; known: max_context, "):
        mlxrt.load(folder, kvs="q8")
    with pytest.raises(BadRequest, match="config must be an EngineConfig, not dict; or give its fields as keywords"):
        mlxrt.load(folder, {"kv": "q8"})


def test_a_stream_of_one_request_has_its_completion():
    with Engine(make("wf")) as engine:
        want = engine.generate([1, 2, 3], max_tokens=6)
        stream = engine.stream([1, 2, 3], max_tokens=6)
        next(stream)
        assert stream.completion.tokens == want.tokens and stream.text == want.text  # reads what is left
        closed = engine.stream([1, 2, 3], max_tokens=6)
        next(closed)
        closed.close()
        with pytest.raises(BadRequest, match="this answer has no end"):
            _ = closed.text
        failed = engine.stream(Request(tokens=(1, 2), on_logits=lambda row: 1 / 0))
        with pytest.raises(ZeroDivisionError):
            _ = failed.text
        with pytest.raises(BadRequest, match="it failed"):
            _ = failed.text
        with pytest.raises(BadRequest, match="several requests has no one completion; read_all"):
            _ = engine.stream([[1, 2], [3]], max_tokens=2).text
        added = engine.stream([1, 2, 3], max_tokens=2)
        added.add(engine.submit(Request(tokens=(4,), params=SHORT)))
        with pytest.raises(BadRequest, match="several requests"):
            _ = added.completion


@pytest.mark.parametrize(
    ("said", "why"), [("", "the text is empty"), ([], "the list of messages is empty"), (7, "int")]
)
def test_what_cannot_be_said_is_refused_for_its_own_reason(said, why):
    with Engine(spoken("gemma"), tokenizer=tokenizer()) as engine, pytest.raises(BadRequest, match=why):
        engine.session().say(said)


def test_a_reply_tells_how_far_it_came():
    with Engine(spoken("gemma"), tokenizer=tokenizer()) as engine:
        session = engine.session(max_tokens=3)
        reply = session.say("why?")
        assert re.fullmatch(r"<Reply: 0 tokens read, not at its end, \d+ prompt tokens>", repr(reply))
        done = reply.completion
        want = (
            f"<Reply: {len(done.tokens)} tokens read, {done.finish_reason}, {done.timings.prompt_tokens} prompt tokens>"
        )
        assert repr(reply) == want
        assert repr(session) == f"<Session: 1 turn, {len(session.tokens)} tokens>"


def test_reprs_and_names_help():
    with Engine(make("wf")) as engine:
        assert repr(engine) == f"<Engine Toy, {engine.context} tokens of context>"
        assert repr(tokenizer()).startswith("<Tokenizer: ") and repr(tokenizer()).endswith(" chat template>")
        assert repr(engine.session()) == "<Session: 0 turns, 0 tokens>"
        with engine.stream([1, 2, 3], max_tokens=2) as stream:
            assert repr(stream) == "<RequestStream: 1 unfinished, 3 prompt tokens>"
        done = engine.generate([1, 2, 3], max_tokens=2)
        assert repr(done).startswith("Completion('', 2 tokens, finish_reason=length, Timings(3 prompt tokens (")
        assert repr(done).endswith(f" generated at {done.timings.decode_tps:.1f}/s, {done.timings.total_s:.2f} s))")
        assert repr(engine.generate([1, 2, 3], max_tokens=2, temperature=1.0, seed=3)).endswith(" s, seed 3))")
        names = dir(engine)
        assert "generate" in names and all(hasattr(engine, n) for n in names if n != "tokenizer")
        assert not {"core", "exclusive", "load_state", "_submit"} & set(names)


def test_the_typed_program_uses_every_public_name():
    text = TYPED_CALLS.read_text()
    used = set(re.findall(r"\bmlxrt\.(\w+)", text))
    assert {n for n in mlxrt.__all__ if n not in mlxrt.ERRORS} <= used
    streams = {n for cls in (Reply, RequestStream, AsyncReply) for n in vars(cls) if not n.startswith("_")} - {"ids"}
    calls = streams.union(*(names.split() for names in CLASSES.values()), dir(Engine.__new__(Engine)))
    assert calls <= set(re.findall(r"\.(\w+)", text))


@pytest.mark.slow
def test_mypy_knows_right_calls_from_wrong_ones(tmp_path):
    def check(text: str) -> list[str]:
        (tmp_path / "program.py").write_text(text)
        command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", str(tmp_path / "program.py")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return [line for line in done.stdout.splitlines() if "program.py" in line and ": error:" in line]

    assert check(TYPED_CALLS.read_text()) == []
    head = "import mlxrt\nengine = mlxrt.load('smollm2')\n"
    wrong = TYPOS.strip().splitlines()
    found = {int(line.split(":")[1]) for line in check(head + "\n".join(wrong))}
    assert found == set(range(3, 3 + len(wrong)))
