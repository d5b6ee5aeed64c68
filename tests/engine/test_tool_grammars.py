"""Required calls in every format: whatever a model likes to write, its call names a tool and fits its schema."""

import random
from dataclasses import replace

import jsonschema
import numpy as np
import pytest

from mlxrt import BadRequest, EngineConfig, Request
from mlxrt.engine.answer_format import AnswerFormat
from mlxrt.engine.answer_grammar import AnswerGrammars
from mlxrt.text import Tokenizer
from mlxrt.text.tool_grammar import CALL_GRAMMARS
from tests.support.agent_tools import AGENTS, NOT_STRICT

MARKERS = {
    "harmony": ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>", "<|call|>", "<|return|>"],
    "gemma4": ["<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>", "<|channel>", "<channel|>"],
    "deepseek": [
        "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ],
    "mistral": ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"],
}  # fmt: skip
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["C", "F", None]},
        "near": {"type": "array", "items": {"$ref": "#/$defs/place"}},
        "exact": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    },
    "required": ["city", "near"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "inner": {"$ref": "#/$defs/place"}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}},
]
# Of XML forms, whose strings are raw text up to an end that nobody writes by chance.
XML = {
    **WEATHER,
    "properties": {**WEATHER["properties"], "city": {"enum": ["Paris", "Rome"]}, "unit": {"type": "number"}},
}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}{{ tools }}{% endif %}"


@pytest.fixture(scope="module")
def make_grammars(tmp_path_factory):
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Library

    def make(calls: str, reasoning: str = "none"):
        folder = tmp_path_factory.mktemp(calls)
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        library = Library(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
        library.add_special_tokens([AddedToken(m, special=True) for m in ["<eos>", *MARKERS.get(calls, ())]])
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        library.decoder = decoders.ByteLevel()
        library.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
        (folder / "chat_template.jinja").write_text(TEMPLATE)
        tokenizer = Tokenizer.from_folder(folder)
        answers = AnswerFormat(tokenizer, EngineConfig(tool_parser=calls, reasoning_parser=reasoning), {})
        return (
            tokenizer,
            answers,
            AnswerGrammars(tokenizer, answers, tokenizer.vocab_size, frozenset(tokenizer.eos_ids)),
        )

    return make


def write_at_random(
    matcher, tokenizer: Tokenizer, rng: random.Random, most: int = 1500, closing_share: float = 0.4
) -> list[int] | None:
    """Tokens the matcher allows, until its form is complete; what closes something is chosen more often."""
    row, tokens = np.empty(-(-tokenizer.vocab_size // 32), np.uint32), []
    for _ in range(most):
        matcher.fill_mask(row)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[: tokenizer.vocab_size])
        assert len(allowed), tokenizer.decode(tokens, skip_special=False)
        closing = [t for t in allowed if t in tokenizer.special_ids or tokenizer.token_bytes(int(t)) in b'"]})</\n']
        token = int(rng.choice(closing if closing and rng.random() < closing_share else list(allowed)))
        if token in tokenizer.eos_ids:
            return tokens
        tokens.append(token)
        if matcher.advance(token):
            return tokens
    return None


@pytest.mark.parametrize("calls", CALL_GRAMMARS)
def test_required_calls_fit_their_schemas(make_grammars, calls):
    tokenizer, answers, grammars = make_grammars(calls, "harmony" if calls == "harmony" else "none")
    weather = XML if calls in ("qwen3_coder", "minimax_m2") else WEATHER
    tools = ({"type": "function", "function": {"name": "get_weather", "parameters": weather}}, TOOLS[1])
    request = Request(messages=({"role": "user", "content": "x"},), tools=tools, tool_choice="required")
    found = set()
    for seed in range(8):
        tokens = write_at_random(grammars.build(request, ()), tokenizer, random.Random(seed))
        if tokens is None:
            continue
        parser = answers.build_parser(request, ())
        segments = [s for token in tokens for s in parser.push(token)] + parser.finish()
        made = [s.call for s in segments if s.call is not None]
        assert made and not "".join(s.text for s in segments if s.kind == "answer").strip(), tokenizer.decode(tokens)
        for call in made:
            assert call.error is None, call
            [tool] = [t for t in tools if t["function"]["name"] == call.name]
            jsonschema.validate(call.parsed, tool["function"]["parameters"])
            found.add(call.name)
    assert found == {"get_weather", "stop"}


@pytest.mark.parametrize("calls", ["gemma4", "qwen3_coder", "python"])
def test_a_strict_tool_is_refused_for_what_its_format_cannot_hold(make_grammars, calls):
    _, _, grammars = make_grammars(calls)
    schema = {"type": "object", "properties": {"code": {"type": "string", "pattern": "^[0-9]{5}$"}}}
    tool = {"type": "function", "function": {"name": "post", "parameters": schema}}
    asked = Request(messages=({"role": "user", "content": "x"},), tools=(tool,), tool_choice="post")
    assert grammars.build(asked, ()) is not None
    strict = Request(messages=asked.messages, tools=({**tool, "strict": True},), tool_choice="post")
    with pytest.raises(BadRequest, match=r"post is strict.*pattern"):
        grammars.build(strict, ())


@pytest.mark.parametrize("agent", AGENTS)
@pytest.mark.parametrize("calls", ["hermes", "gemma4"])
def test_tools_of_coding_agents(make_grammars, agent, calls, caplog):
    """Each of an agent's tools, by its name, and all of them at once; strict ones are enforced whole or refused."""
    tokenizer, answers, grammars = make_grammars(calls)
    tools, written = AGENTS[agent], set()
    asked = Request(messages=({"role": "user", "content": "x"},), tools=tools, tool_choice="required")
    for seed, choice in enumerate(["required", *(tool["function"]["name"] for tool in tools)]):
        request = replace(asked, tool_choice=choice)
        tokens = write_at_random(grammars.build(request, ()), tokenizer, random.Random(seed), 600, closing_share=0.7)
        if tokens is None:
            continue
        parser = answers.build_parser(request, ())
        made = [s.call for s in [s for t in tokens for s in parser.push(t)] + parser.finish() if s.call is not None]
        assert made and choice in ("required", made[0].name), tokenizer.decode(tokens)
        for call in made:
            assert call.error is None, call
            [tool] = [t for t in tools if t["function"]["name"] == call.name]
            if calls == "hermes":
                jsonschema.validate(call.parsed, tool["function"]["parameters"])
            written.add(call.name)
    assert len(written) > len(tools) / 2
    assert ("propertyNames" in caplog.text) == (agent == "claude code")
    for tool in tools if calls == "hermes" else ():
        name = tool["function"]["name"]
        strict = replace(asked, tools=({**tool, "strict": True},), tool_choice=name)
        if name in NOT_STRICT:
            with pytest.raises(BadRequest, match=f"{name} is strict.*propertyNames"):
                grammars.build(strict, ())
        else:
            assert grammars.build(strict, ()) is not None


def test_harmony_thinks_before_its_call(make_grammars):
    tokenizer, _, grammars = make_grammars("harmony", "harmony")
    request = Request(messages=({"role": "user", "content": "x"},), tools=tuple(TOOLS), tool_choice="stop")
    matcher = grammars.build(request, ())
    text = '<|channel|>analysis<|message|>Hm {"a": 1}<|end|><|start|>assistant<|channel|>commentary to=functions.stop '
    text += "<|constrain|>json<|message|>{}"
    row = np.empty(-(-tokenizer.vocab_size // 32), np.uint32)
    for token in tokenizer.encode(text, special=False):
        matcher.fill_mask(row)
        assert row[token // 32] >> np.uint32(token % 32) & 1, tokenizer.decode([token], skip_special=False)
        complete = matcher.advance(token)
    assert complete


def test_calls_of_an_unknown_form_are_said_to_be_guessed(make_grammars, caplog):
    tokenizer, *_ = make_grammars("hermes")
    own = AnswerFormat(tokenizer, EngineConfig(), {})
    assert own.found.calls == "hermes" and not own.found.calls_known
    request = Request(messages=({"role": "user", "content": "x"},), tools=tuple(TOOLS))
    for _ in range(2):
        own.build_parser(request, ())
    assert [r.message for r in caplog.records if "not known" in r.message and "tool_parser" in r.message] != []
    assert sum("not known" in r.message for r in caplog.records) == 1
