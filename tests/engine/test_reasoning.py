"""Reasoning, tool calls and thinking budgets through the engine, on tiny models with real special tokens."""

import dataclasses
import json

import mlx.core as mx
import pytest

from mlxrt import BadRequest, Engine, EngineConfig, Request
from mlxrt.engine.engine import Source
from mlxrt.text import Tokenizer
from mlxrt.text.builtin_templates import HARMONY
from tests.support import toy_models as toy

QWEN = """{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.reasoning_content and loop.last %}{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
{{- m.content }}{%- for c in m.tool_calls or [] %}{{ '<tool_call>\\n' + c.function | tojson + '\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% if enable_thinking is defined and
not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"""
GEMMA = """{%- for m in messages %}{{ '<|turn>' + m.role + '\\n' + m.content + '<turn|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|turn>model\\n' }}{% if not enable_thinking | default(true) %}
{{- '<|channel>thought\\n<channel|>' }}{% endif %}{% endif %}"""
FAMILIES = {
    "qwen3": (QWEN, ("<think>", "</think>", "<tool_call>", "</tool_call>"), ("<|im_start|>", "<|im_end|>")),
    "gemma4": (GEMMA, (), ("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>")),
}
GPT_OSS = (
    HARMONY,
    (),
    ("<|start|>", "<|return|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>"),
)
MARKERS = {"qwen3": ("<think>", "</think>"), "gemma4": ("<|channel>", "<channel|>")}
ASK = ({"role": "user", "content": "Hi"},)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"type": "integer"}}}}}]


def make_tokenizer(folder, template: str, plain: tuple[str, ...], special: tuple[str, ...]) -> Tokenizer:
    """One token for each byte, and the family's special tokens."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Fast

    tok = Fast(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    tok.pre_tokenizer, tok.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tok.add_tokens([AddedToken(t, special=False, normalized=False) for t in plain])
    tok.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tok.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, "eos_token": special[1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.from_folder(folder)


def make_engine(folder, name: str, family, **config) -> Engine:
    tokenizer = make_tokenizer(folder, *family)
    mx.random.seed(3)
    shape = dataclasses.replace(toy.CONFIG, vocab_size=tokenizer.vocab_size)
    model = type("Toy", (toy.Toy,), {"kinds": "f" if name == "qwen3" else "wf"})(shape)
    model.fuse()
    mx.eval(model.parameters())
    return Engine(model, EngineConfig(kv_memory="16M", **config), tokenizer, Source(name))


@pytest.fixture(scope="module", params=FAMILIES)
def engine(request, tmp_path_factory):
    with make_engine(tmp_path_factory.mktemp("tokenizer"), request.param, FAMILIES[request.param]) as engine:
        yield engine


def write(text: str, engine):
    """A callback that lets the model write this text."""
    tokens = iter(engine.tokenizer.encode(text, special=False))

    def force(row) -> None:
        row.add({next(tokens): 1e6})

    return {"on_logits": force, "max_tokens": len(engine.tokenizer.encode(text, special=False))}


def ids(engine, *names):
    return [engine.tokenizer.lexer_vocabulary.added[name] for name in names]


def count_thinking(engine, tokens) -> int:
    """Tokens between the first opening marker and the closing one after it."""
    opened, closed = ids(engine, *MARKERS[engine.source.name])
    start = tokens.index(opened) + 1
    return tokens.index(closed, start) - start


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_budgets_are_exact_in_batches_and_leave_the_others_alone(engine, temperature):
    opened = ids(engine, MARKERS[engine.source.name][0])[0]
    bias = {opened: 100.0}  # it opens a block at once, and again and again
    closed = ids(engine, MARKERS[engine.source.name][1])[0]

    def make(budget, seed):
        options = {} if budget is None else {"thinking_budget": budget, "logit_bias": bias, "suppress": (closed,)}
        return Request.of(list(ASK), max_tokens=40, temperature=temperature, seed=seed, ignore_eos=True, **options)

    budgets = [None, 0, 1, 2, 5, 13, 30, None]
    requests = [make(budget, seed) for seed, budget in enumerate(budgets)]
    found = engine.generate(requests)
    for request, budget, done in zip(requests, budgets, found):
        assert len(done.tokens) == 40
        if budget is None:
            assert done.tokens == engine.generate(request).tokens
        else:
            assert count_thinking(engine, list(done.tokens)) == budget == done.timings.reasoning_tokens
            assert done.raw == engine.tokenizer.decode(list(done.tokens), skip_special=False)


def test_a_budget_with_a_grammar(engine):
    opened, closed = ids(engine, *MARKERS[engine.source.name])
    done = engine.generate(
        list(ASK), max_tokens=40, thinking_budget=5, response_format={"type": "choice", "choices": ["yes", "no"]},
        logit_bias={opened: 100.0}, suppress=(closed,),
    )  # fmt: skip
    assert done.timings.reasoning_tokens == 5 == count_thinking(engine, list(done.tokens))
    assert done.text in ("yes", "no") and done.finish_reason == "stop"


def test_a_budget_that_is_not_reached_changes_nothing(engine):
    free = engine.generate(list(ASK), max_tokens=30, ignore_eos=True)
    assert engine.generate(list(ASK), max_tokens=30, ignore_eos=True, thinking_budget=1000).tokens == free.tokens


def test_events_and_completion(engine):
    opened, closed = MARKERS[engine.source.name]
    header = "thought\n" if engine.source.name == "gemma4" else "\n"
    text = f"{opened}{header}Hmm é.\n{closed}\n\nYes. "
    events = list(engine.stream(list(ASK), **write(text, engine)))
    done = engine.generate(list(ASK), **write(text, engine))
    assert (done.reasoning, done.text, done.raw) == ("Hmm é.", "Yes. ", text)
    assert "".join(e.text for e in events if e.kind == "answer") == done.text
    assert "".join(e.text for e in events if e.kind == "reasoning") == done.reasoning
    assert tuple(e.token for e in events if e.token is not None) == done.tokens
    assert done.to_message() == {"role": "assistant", "content": "Yes. ", "reasoning_content": "Hmm é."}
    raw = engine.generate("Hi", **write(text, engine))
    assert raw.reasoning == "" and opened in raw.raw


def test_stop_strings_end_the_answer_not_the_reasoning(engine):
    opened, closed = MARKERS[engine.source.name]
    options = write(f"{opened}thought\nA stop.{closed}An answer. stop. more", engine)
    done = engine.generate(list(ASK), stop="stop", **options)
    assert done.finish_reason == "stop" and done.text == "An answer. " and "stop" in done.reasoning


def test_calls_and_sessions(engine):
    if engine.source.name != "qwen3":
        pytest.skip("one family suffices")
    call = '<tool_call>\n{"name": "f", "arguments": {"x": 3}}\n</tool_call>'
    session = engine.session(tools=TOOLS)
    reply = session.say("Hi", **write(f"<think>\nI call.\n</think>\n\n{call}", engine))
    [made] = reply.completion.tool_calls
    assert (made.name, made.parsed, made.error, reply.text) == ("f", {"x": 3}, None, "")
    assert session.messages[-1]["reasoning_content"] == "I call."
    again = session.say({"role": "tool", "tool_call_id": made.id, "content": "9"}, **write("Nine.", engine))
    assert again.text == "Nine." and again.completion.cached_tokens > 0
    assert [m["role"] for m in session.messages] == ["user", "assistant", "tool", "assistant"]
    tools = engine.generate(list(ASK), tools=TOOLS, tool_choice="none", **write(call, engine))
    assert not tools.tool_calls and tools.text == call


def test_what_does_not_apply_is_refused(engine):
    for bad in (
        {"thinking": "maybe"}, {"thinking": "on", "enable_thinking": False}, {"thinking_budget": -1},
        {"tool_choice": "required"}, {"template_options": {"messages": []}}, {"thinking": "off", "thinking_budget": 3},
        {"thinking": "on", "template_options": {"enable_thinking": False}},
    ):  # fmt: skip
        with pytest.raises(BadRequest):
            engine.generate(list(ASK), **bad)
    with pytest.raises(BadRequest, match="thinking_budget does not apply"):
        engine.generate("raw text", thinking_budget=3)
    with pytest.raises(BadRequest, match="image_url"):
        engine.generate([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])
    with pytest.raises(BadRequest, match="reasoning_parser"):
        Engine(engine.model, EngineConfig(reasoning_parser="nothing", kv_memory="1M"), engine.tokenizer)


TURNS = {
    "gpt_oss": (
        GPT_OSS,
        "<|channel|>analysis<|message|>User wants 2+2.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>It is 4.<|return|>",
    ),
    "gemma4": (FAMILIES["gemma4"], "<|channel>thought\nUser wants 2+2.\n<channel|>It is 4.<turn|>"),
}


@pytest.mark.parametrize("name", TURNS)
def test_history_is_clean_and_the_next_turn_reuses_it(name, tmp_path):
    family, text = TURNS[name]
    with make_engine(tmp_path, name, family) as engine:
        session = engine.session("Answer shortly, as you always do, whatever the question is.")
        reply = session.say("What is 2+2? " * 6, **write(text, engine))
        assert (reply.text, reply.completion.reasoning) == ("It is 4.", "User wants 2+2.")
        assert session.messages[-1] == {
            "role": "assistant", "content": "It is 4.", "reasoning_content": "User wants 2+2.",
        }  # fmt: skip
        ran = session.tokens
        again = session.say("And 3+3?", **write(text, engine)).completion
        prompt = engine.encode(Request.of(list(session.messages[:-1])))
        same = next((i for i, (a, b) in enumerate(zip(ran, prompt)) if a != b), len(ran))
        node = engine.core.node_size
        assert same - same % node - node < again.cached_tokens <= same and again.cached_tokens >= same - same % node
        assert "User wants" not in engine.tokenizer.decode(list(prompt), skip_special=False)
        alone = engine.generate(list(session.messages[:-1]), max_tokens=12)
        with make_engine(tmp_path, name, family) as fresh:
            assert fresh.generate(list(session.messages[:-1]), max_tokens=12).tokens == alone.tokens
