"""Structured output: answers that end are of their form, and are those of a run alone."""

import json
import re
import threading

import jsonschema
import mlx.core as mx
import pytest

from mlxrt import BadRequest, Engine, EngineConfig, GrammarFailed, Request, SamplingParams
from mlxrt.engine import Source
from mlxrt.engine.answer_grammar import AnswerGrammars
from mlxrt.engine.request import Finish
from mlxrt.text import grammar
from mlxrt.text.grammar import GatedMatcher
from tests.support.ascii_tokenizer import write_ascii_tokenizer
from tests.support.state_machine.kinds import memory_for
from tests.support.toy_models import KINDS

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["x", "yy"]},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "more": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["name", "n"],
    "additionalProperties": False,
}
FORMATS = [
    {"type": "json_schema", "schema": SCHEMA},
    {"type": "regex", "pattern": r"[0-9]{3}-[a-f]+\."},
    {"type": "choice", "choices": ["yes", "yesterday", "no (really)", "a|b"]},
    {"type": "grammar", "grammar": 'start: "(" /[a-c]/ start? ")"'},
    {"type": "grammar", "grammar": 'root ::= "[" ("0" | "1"){2,4} "]"'},
    None,
]
PATTERNS = {1: r"[0-9]{3}-[a-f]+\.", 2: r"yes|yesterday|no \(really\)|a\|b", 3: r"(\([a-c])+\)+", 4: r"\[[01]{2,4}\]"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return write_ascii_tokenizer(tmp_path_factory.mktemp("ascii"))


@pytest.fixture(scope="module")
def make_engine(tokenizer):
    def make(kind: str = "full", **config):
        return Engine(KINDS[kind](), EngineConfig(**config), tokenizer, Source(eos=frozenset({0})))

    return make


def ask(i: int, n: int = 100, **params) -> Request:
    form = FORMATS[i % len(FORMATS)]
    options = {"seed": i} if params.get("temperature") else {}
    return Request(prompt=f"answer {i}:", response_format=form, params=SamplingParams(max_tokens=n, **options | params))


def check_form(i: int, text: str) -> None:
    if i % len(FORMATS) == 0:
        jsonschema.validate(json.loads(text), SCHEMA)
    elif (pattern := PATTERNS.get(i % len(FORMATS))) is not None:
        assert re.fullmatch(pattern, text), text


def test_answers_that_end_are_of_their_form(make_engine):
    with make_engine() as engine:
        asked = [(i, ask(i, temperature=1.0, seed=i, top_k=k)) for i in range(18) for k in (0, 5)]
        done = engine.generate([request for _, request in asked])
        ended = [i % len(FORMATS) for (i, _), c in zip(asked, done) if c.finish_reason is Finish.STOP]
        assert set(ended) >= {0, 1, 2, 3, 4} and len(ended) > 20
        for (i, _), completion in zip(asked, done):
            if completion.finish_reason is Finish.STOP:
                check_form(i, completion.text)
            else:
                assert completion.finish_reason is Finish.LENGTH and len(completion.tokens) == 100


def test_an_answer_cut_by_the_limit_says_so(make_engine):
    with make_engine() as engine:
        whole = engine.generate(ask(4))
        assert whole.finish_reason is Finish.STOP and whole.tokens[-1] != 0  # nothing can follow the bracket
        cut = engine.generate(ask(4, n=len(whole.tokens) - 1))
        assert cut.finish_reason is Finish.LENGTH and whole.text.startswith(cut.text)
        assert engine.generate(ask(4, n=len(whole.tokens))).finish_reason is Finish.STOP


@pytest.mark.parametrize("kind", ["full", "window", "hybrid", "q8"])
def test_rows_in_company_are_those_of_a_run_alone(make_engine, kind):
    asked = [ask(i, 40, temperature=t, repetition_penalty=p) for i, (t, p) in enumerate([(0.0, 1), (1.0, 1.1)] * 3)]
    asked += [ask(5, 60), ask(0, 60, logprobs=3), ask(11, 50, temperature=0.8)]
    with make_engine(kind, prefix_cache=False) as engine:
        alone = [engine.generate(request) for request in asked]
    with make_engine(kind) as engine:
        together = engine.generate(asked)
    assert [c.tokens for c in together] == [c.tokens for c in alone]
    assert [c.finish_reason for c in together] == [c.finish_reason for c in alone]


def test_preempted_answers_go_on_in_their_form(make_engine):
    form = {"type": "regex", "pattern": "([a-f][0-9]){25}!"}
    params = [SamplingParams(max_tokens=60, temperature=1.0, seed=i) for i in range(6)]
    asked = [Request(prompt=f"answer {i}:", response_format=form, params=p) for i, p in enumerate(params)]
    with make_engine() as engine:
        alone = [engine.generate(request).tokens for request in asked]
    with make_engine(kv_memory=memory_for("full", 240), max_running=6) as engine:
        together = engine.generate(asked)
        assert engine.stats().preemptions > 0
    assert [c.tokens for c in together] == alone and {c.finish_reason for c in together} == {Finish.STOP}


def test_stop_strings_and_cancelling_end_a_constrained_answer(make_engine):
    with make_engine() as engine:
        whole = engine.generate(ask(0, seed=3, temperature=1.0))
        stopped = engine.generate(ask(0, seed=3, temperature=1.0, stop=('"n"',)))
        assert stopped.text == whole.text.partition('"n"')[0]
        with engine.stream(ask(0, seed=3, temperature=1.0)) as stream:
            first = next(iter(stream))
        assert whole.text.startswith(first.text)
        assert engine.generate(ask(0, seed=3, temperature=1.0)).tokens == whole.tokens


def test_formats_that_cannot_be_held_are_refused_before_queueing(make_engine):
    refused = [
        ({"type": "json_schema", "schema": {"type": "object", "$ref": "#/nowhere"}}, "nowhere"),
        ({"type": "json_schema", "schema": {"not": {"type": "string"}}}, "not"),
        ({"type": "json_schema"}, "schema"),
        ({"type": "json_schema", "schema": 3}, "dict"),
        ({"type": "regex", "pattern": "("}, "regex"),
        ({"type": "regex", "pattern": "(?=a)b"}, "regex"),
        ({"type": "grammar", "grammar": "start: other"}, "other"),
        ({"type": "grammar", "grammar": "root ::= ["}, "GBNF"),
        ({"type": "choice", "choices": []}, "choices"),
        ({"type": "xml"}, "xml"),
        ("json", "dict"),
    ]
    with make_engine() as engine:
        for form, named in refused:
            with pytest.raises(BadRequest, match=re.escape(named)):
                engine.generate("a", response_format=form)
        assert engine.stats().waiting == engine.stats().running == 0
        assert engine.generate("a", max_tokens=3, response_format={"type": "text"}).tokens


def test_formats_that_take_for_ever_to_compile_leave_others_their_time(make_engine, monkeypatch):
    """llguidance takes minutes to say that the last rule of a long chain is missing."""
    ended = threading.Event()
    compile_now = grammar.compile_format

    def compile_slowly(wanted, tokenizer):
        if "r0" in wanted.text:
            ended.wait(60)
        return compile_now(wanted, tokenizer)

    monkeypatch.setattr(grammar, "compile_format", compile_slowly)
    with make_engine() as engine:
        engine.generate(ask(1, n=3))
        monkeypatch.setattr(grammar, "COMPILE_SECONDS", 0.3)
        for i in range(2):
            with pytest.raises(BadRequest, match=r"not compiled within 0\.3 s"):
                engine.generate("x", response_format={"type": "grammar", "grammar": f'start: r0\nr0: "{i}"'})
        monkeypatch.setattr(grammar, "COMPILE_SECONDS", 60.0)
        done = engine.generate("x", response_format={"type": "choice", "choices": ["another"]}, max_tokens=9)
        assert done.text == "another"
        ended.set()


def test_a_callback_that_breaks_the_form_ends_its_request_alone(make_engine):
    def write_space(row):
        row.edit((mx.arange(97) == 2).astype(mx.float32))

    with make_engine() as engine:
        form = FORMATS[1]
        asked = [Request(prompt="a", response_format=form, on_logits=write_space), ask(1)]
        stream = engine.stream(asked)
        ends = {e.id: e for e in stream if e.finish_reason}
        errors = [ends[id].error for id in sorted(ends)]
        assert isinstance(errors[0], GrammarFailed) and errors[1] is None


def test_rows_that_pad_the_embedding_are_never_chosen(tmp_path):
    tokenizer = write_ascii_tokenizer(tmp_path, size=90)
    with Engine(KINDS["full"](), EngineConfig(), tokenizer, Source(eos=frozenset({0}))) as engine:
        form = {"type": "regex", "pattern": "[a-t]{40}"}
        bias = dict.fromkeys(range(90, 97), 1000.0)
        done = engine.generate("hi", response_format=form, logit_bias=bias)
        assert re.fullmatch("[a-t]{40}", done.text)


def test_a_model_without_an_end_token_ends_with_its_form(tokenizer):
    with Engine(KINDS["full"](), EngineConfig(), tokenizer) as engine:
        done = engine.generate("hi", response_format={"type": "regex", "pattern": "[a-t]{40}"})
        assert re.fullmatch("[a-t]{40}", done.text) and done.finish_reason is Finish.STOP


# Reasoning and tool calls, through a chat template

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\\n{% endfor %}"
    "{% if tools %}<tool_call>{{ tools }}</tool_call>{% endif %}"
    "[assistant]{% if enable_thinking is defined and not enable_thinking %}<think>\\n\\n</think>\\n{% endif %}"
)
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {
        "type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["n"],
        "additionalProperties": False}}},
    {"type": "function", "function": {"name": "look", "parameters": {
        "type": "object", "properties": {"at": {"enum": ["a", "b"]}}, "required": ["at"], "additionalProperties": False,
        "propertyNames": {"maxLength": 9}}}},
]  # fmt: skip
ASKED = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def chat_engine(tmp_path_factory):
    tokenizer = write_ascii_tokenizer(tmp_path_factory.mktemp("chat"), TEMPLATE)
    with Engine(KINDS["full"](), EngineConfig(), tokenizer, Source(eos=frozenset({0}))) as engine:
        yield engine


def test_required_calls_name_a_tool_and_fit_its_schema(chat_engine):
    found = set()
    for seed in range(6):
        done = chat_engine.generate(
            ASKED, tools=TOOLS, tool_choice="required", thinking="off", temperature=1.0, seed=seed, max_tokens=200
        )
        if done.finish_reason is Finish.STOP:
            for call in done.tool_calls:
                found.add(call.name)
                [tool] = [t for t in TOOLS if t["function"]["name"] == call.name]
                jsonschema.validate(json.loads(call.arguments), tool["function"]["parameters"])
            assert done.tool_calls and not done.text.strip()
    assert found == {"add", "look"}
    named = chat_engine.generate(ASKED, tools=TOOLS, tool_choice="look", thinking="off", max_tokens=200)
    assert [call.name for call in named.tool_calls][:1] in ([], ["look"])
    with pytest.raises(BadRequest, match="none of the tools"):
        chat_engine.generate(ASKED, tools=TOOLS, tool_choice="other")
    strict = [{**TOOLS[1], "strict": True}]
    with pytest.raises(BadRequest, match=r"look is strict.*propertyNames"):
        chat_engine.generate(ASKED, tools=strict, tool_choice="auto")


def test_the_form_holds_after_the_reasoning(chat_engine, monkeypatch):
    """The reasoning is anything; where it was forced to end, the answer is of the form."""
    form = {"type": "regex", "pattern": "[0-9]{3}"}
    off = chat_engine.generate(ASKED, response_format=form, thinking="off", max_tokens=50)
    assert re.fullmatch("[0-9]{3}", off.text) and not off.reasoning
    text, said = "<think>so it is</think>\n\n", []
    ids = chat_engine.tokenizer.encode(text, special=False)

    def speak(row):
        if len(row.output_tokens) < len(ids):
            row.edit((mx.arange(97) == ids[len(row.output_tokens)]).astype(mx.float32) * 100)
            said.append(row)

    opener = next(t for t in range(97) if chat_engine.tokenizer.token_bytes(t) == b"<")

    def gated(self, matcher, request, prompt):
        return GatedMatcher(matcher, chat_engine.tokenizer, "</think>", opener=opener)

    monkeypatch.setattr(AnswerGrammars, "_after_reasoning", gated)
    done = chat_engine.generate(ASKED, response_format=form, max_tokens=80, on_logits=speak)
    assert re.fullmatch("[0-9]{3}", done.text.strip()) and done.reasoning.strip() == "so it is"
    free = chat_engine.generate(ASKED, response_format=form, max_tokens=80)  # begins without reasoning
    assert re.fullmatch("[0-9]{3}|<.*", free.raw, re.DOTALL)
