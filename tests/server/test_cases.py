"""Black-box cases, one request each: what the public test suites of llama.cpp's and vLLM's servers ask of a server.

A case is a path, a body, what the model says (where it matters), the status, and what must hold of the answer.
"""

# ruff: noqa: E501  tables of requests
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from mlxrt import EngineConfig

from .conftest import Server, running

HI = [{"role": "user", "content": "hi"}]
CHAT, TEXT, RESPONSES, CLAUDE = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
COUNT, OLLAMA, GENERATE = "/v1/messages/count_tokens", "/api/chat", "/api/generate"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "of a city", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
CALLED = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
CALLING = [*HI, {"role": "assistant", "content": None, "tool_calls": [CALLED]}]
RESULT = [*CALLING, {"role": "tool", "tool_call_id": "c1", "content": "sunny"}]
CLAUDE_TOOLS = [{"name": "weather", "description": "of a city", "input_schema": PARAMETERS}]
USE = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Bonn"}}
CLAUDE_RESULT = [
    *HI,
    {"role": "assistant", "content": [{"type": "text", "text": "I look"}, USE]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "sunny"}]},
]
FLAT_TOOLS = [{"type": "function", **FUNCTION}]
IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/secret.png"}}
CLAUDE_IMAGE = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1:9/secret.png"}}
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}
THOUGHT = "<think>\nhm hm\n</think>\n\nfine"


@dataclass(frozen=True)
class Answer:
    status: int
    text: str
    headers: Any

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def events(self) -> list[Any]:
        """The data of a stream's frames, whatever its protocol; not the last mark."""
        lines = [line.removeprefix("data: ") for line in self.text.splitlines()]
        return [json.loads(line) for line in lines if line.startswith("{")]

    @property
    def choice(self) -> Any:
        return self.json["choices"][0]

    @property
    def message(self) -> Any:
        return self.choice["message"]

    @property
    def error(self) -> Any:
        return self.json["error"]

    @property
    def kinds(self) -> list[str]:
        return [event["type"] for event in self.events]

    def joined(self, field: str = "content") -> str:
        return "".join(e["choices"][0]["delta"].get(field) or "" for e in self.events if e["choices"])


@dataclass(frozen=True)
class Case:
    name: str
    path: str
    body: Any
    holds: Callable[[Answer], Any] = lambda a: True
    status: int = 200
    says: str = ""


def ask(path: str = CHAT, **fields: Any) -> dict[str, Any]:
    """A body with what its protocol requires; a field of None is left out."""
    body: dict[str, Any] = {"model": "toy", "max_tokens": 6}
    if path in (CHAT, CLAUDE, OLLAMA, COUNT):
        body["messages"] = HI
    if path == RESPONSES:
        body = {"model": "toy", "input": "hi", "max_output_tokens": 6}
    if path in (TEXT, GENERATE):
        body["prompt"] = "hi"
    if path in (OLLAMA, GENERATE):
        body |= {"stream": False, "options": {"num_predict": 6}}
    if path in (OLLAMA, GENERATE, COUNT):
        del body["max_tokens"]
    return {name: value for name, value in (body | fields).items() if value is not None}


def chat(name: str, holds=lambda a: True, status: int = 200, says: str = "", **fields: Any) -> Case:
    return Case(f"chat: {name}", CHAT, ask(**fields), holds, status, says)


def text(name: str, holds=lambda a: True, status: int = 200, says: str = "", **fields: Any) -> Case:
    return Case(f"completions: {name}", TEXT, ask(TEXT, **fields), holds, status, says)


def claude(name: str, holds=lambda a: True, status: int = 200, says: str = "", **fields: Any) -> Case:
    return Case(f"anthropic: {name}", CLAUDE, ask(CLAUDE, **fields), holds, status, says)


def response(name: str, holds=lambda a: True, status: int = 200, says: str = "", **fields: Any) -> Case:
    return Case(f"responses: {name}", RESPONSES, ask(RESPONSES, **fields), holds, status, says)


def ollama(
    name: str, holds=lambda a: True, status: int = 200, says: str = "", path: str = OLLAMA, **fields: Any
) -> Case:
    return Case(f"ollama: {name}", path, ask(path, **fields), holds, status, says)


def bad(param: str) -> Callable[[Answer], bool]:
    return lambda a: a.error["param"] == param and param in a.error["message"]


def claude_bad(words: str) -> Callable[[Answer], bool]:
    return lambda a: a.error["type"] == "invalid_request_error" and words in a.error["message"] and a.json["request_id"]


def make_streams(**fields: Any) -> dict[str, Any]:
    return {"stream": True, **fields}


CHAT_CASES = [
    chat("an answer has all its fields", lambda a: a.json["object"] == "chat.completion" and a.json["id"]),
    chat("the first message is the assistant's", lambda a: a.message["role"] == "assistant"),
    chat("usage adds up", lambda a: a.json["usage"]["total_tokens"] == a.json["usage"]["prompt_tokens"] + 6),
    chat("max_tokens cuts with length", lambda a: a.choice["finish_reason"] == "length"),
    chat("an end is a stop", lambda a: a.choice["finish_reason"] == "stop" and a.message["content"] == "yes", says="yes"),
    chat("max_completion_tokens", lambda a: a.json["usage"]["completion_tokens"] == 3, max_tokens=None, max_completion_tokens=3),
    chat("max_completion_tokens goes first", lambda a: a.json["usage"]["completion_tokens"] == 3, max_completion_tokens=3),
    chat("one token", lambda a: a.json["usage"]["completion_tokens"] == 1, max_tokens=1),
    chat("no tokens at all", bad("max_tokens"), 400, max_tokens=0),
    chat("a negative limit", bad("max_tokens"), 400, max_tokens=-1),
    chat("no messages", bad("messages"), 400, messages=None),
    chat("messages as text", bad("messages"), 400, messages="hi"),
    chat("a message without a role", lambda a: "role" in a.error["message"], 400, messages=[{"content": "x"}]),
    chat("an unknown role", lambda a: "role" in a.error["message"], 400, messages=[{"role": "wizard", "content": "x"}]),
    chat("content as parts", messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}]),
    chat("several parts", messages=[{"role": "user", "content": [{"type": "text", "text": t} for t in "abc"]}]),
    chat("no content", lambda a: "content" in a.error["message"], 400, messages=[{"role": "user"}]),
    chat("content null of a user", lambda a: "content" in a.error["message"], 400, messages=[{"role": "user", "content": None}]),
    chat("a developer's message", messages=[{"role": "developer", "content": "be kind"}, *HI]),
    chat("a system message", messages=[{"role": "system", "content": "be kind"}, *HI]),
    chat("a name in a message", messages=[{"role": "user", "content": "hi", "name": "ann"}]),
    chat("an image is refused and not fetched", lambda a: "image" in a.error["message"], 400, messages=[{"role": "user", "content": [IMAGE]}]),
    chat("a model that is not there", lambda a: a.error["code"] == "model_not_found", 404, model="other"),
    chat("no model means the first", model=None),
    chat("the model's name is echoed", lambda a: a.json["model"] == "toy"),
    chat("temperature 0 is greedy", lambda a: a.message["content"], temperature=0),
    chat("temperature too low", bad("temperature"), 400, temperature=-0.1),
    chat("temperature as text", bad("temperature"), 400, temperature="1"),
    chat("top_p over 1", bad("top_p"), 400, top_p=1.1),
    chat("top_k off as vLLM writes it", top_k=-1, temperature=1.0),
    chat("min_p, repetition_penalty, top_k", min_p=0.1, repetition_penalty=1.1, top_k=5, temperature=0.7),
    chat("a repetition_penalty of 0", bad("repetition_penalty"), 400, repetition_penalty=0),
    chat("penalties", presence_penalty=1.5, frequency_penalty=-1.5),
    chat("a seed", seed=7, temperature=1.0),
    chat("a negative seed", seed=-7, temperature=1.0),
    chat("a seed that is no number", bad("seed"), 400, seed="x"),
    chat("stop as text", lambda a: a.message["content"] == "a b " and a.choice["finish_reason"] == "stop", stop="c", says="a b c d", max_tokens=20),
    chat("stop as a list", lambda a: a.message["content"] == "a ", stop=["x", "b"], says="a b c d", max_tokens=20),
    chat("stop null", stop=None),
    chat("stop empty", stop=[]),
    chat("stop of numbers", bad("stop"), 400, stop=[1]),
    chat("too many stops", bad("stop"), 400, stop=["x"] * 100),
    chat("stop_token_ids", lambda a: a.message["content"] == "a" and a.choice["finish_reason"] == "stop", stop_token_ids=[65], says="abc"),
    chat("ignore_eos", lambda a: a.json["usage"]["completion_tokens"] == 6, ignore_eos=True),
    chat("n gives n choices", lambda a: [c["index"] for c in a.json["choices"]] == [0, 1, 2], n=3),
    chat("n too high", bad("n"), 400, n=1000),
    chat("logprobs", lambda a: len(a.choice["logprobs"]["content"]) == 6, logprobs=True),
    chat("top_logprobs", lambda a: all(len(t["top_logprobs"]) == 3 for t in a.choice["logprobs"]["content"]), logprobs=True, top_logprobs=3),
    chat("no logprobs unless asked", lambda a: a.choice["logprobs"] is None),
    chat("top_logprobs over 20", bad("top_logprobs"), 400, logprobs=True, top_logprobs=21),
    chat("top_logprobs without logprobs", bad("top_logprobs"), 400, top_logprobs=2),
    chat("logprobs have bytes", lambda a: all(bytes(t["bytes"]) for t in a.choice["logprobs"]["content"]), logprobs=True),
    chat("a bias forces a token", lambda a: set(a.message["content"]) == {"B"}, logit_bias={"33": 100}),
    chat("a bias out of range", bad("logit_bias"), 400, logit_bias={"1": 101}),
    chat("a bias of a token that is not there", lambda a: "logit_bias" in a.error["message"], 400, logit_bias={"99999": 1}),
    chat("a bias as a list", bad("logit_bias"), 400, logit_bias=[1]),
    chat("json_object gives JSON", lambda a: isinstance(json.loads(a.message["content"] or "{}"), dict), response_format={"type": "json_object"}, says='{"a": 1}', max_tokens=40),
    chat("json_schema is enforced", lambda a: json.loads(a.message["content"])["a"] in "xy", response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}, max_tokens=60),
    chat("an unknown format", lambda a: "response_format" in a.error["message"], 400, response_format={"type": "yaml"}),
    chat("a schema that is none", lambda a: a.error["type"] == "invalid_request_error", 400, response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": 5}}}),
    chat("response_format text", response_format={"type": "text"}),
    chat("tools are called", lambda a: a.choice["finish_reason"] == "tool_calls" and json.loads(a.message["tool_calls"][0]["function"]["arguments"]) == {"city": "Bonn"}, tools=TOOLS, says=CALL, max_tokens=200),
    chat("a call has an id and no content", lambda a: a.message["tool_calls"][0]["id"] and a.message["content"] is None, tools=TOOLS, says=CALL, max_tokens=200),
    chat("two calls at once", lambda a: len(a.message["tool_calls"]) == 2, tools=TOOLS, says=CALL + "\n" + CALL, max_tokens=300),
    chat("tool_choice none", lambda a: "tool_calls" not in a.message, tools=TOOLS, tool_choice="none"),
    chat("tool_choice auto may just talk", lambda a: a.message["content"] == "no", tools=TOOLS, tool_choice="auto", says="no"),
    chat("tool_choice required calls", lambda a: a.message["tool_calls"][0]["function"]["name"] == "weather", tools=TOOLS, tool_choice="required", max_tokens=200, says=CALL),
    chat("tool_choice by name", lambda a: a.message["tool_calls"][0]["function"]["name"] == "weather", tools=TOOLS, tool_choice={"type": "function", "function": {"name": "weather"}}, max_tokens=200, says=CALL),
    chat("tool_choice names no tool", bad("tool_choice"), 400, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "other"}}),
    chat("tool_choice without tools", bad("tool_choice"), 400, tool_choice="required"),
    chat("tool_choice of no kind", bad("tool_choice"), 400, tools=TOOLS, tool_choice="always"),
    chat("no tools in the list", tools=[]),
    chat("too many tools", bad("tools"), 400, tools=TOOLS * 1025),
    chat("a tool without a function", bad("tools[0]"), 400, tools=[{"type": "function"}]),
    chat("a tool's result", messages=RESULT, tools=TOOLS),
    chat("tool_calls that are no list", lambda a: "message 1: tool_calls must be a list" in a.error["message"], 400, messages=[*HI, {"role": "assistant", "tool_calls": 5}]),
    chat("tool_calls as an object", lambda a: "tool_calls must be a list" in a.error["message"], 400, messages=[*HI, {"role": "assistant", "tool_calls": CALLED}]),
    chat("arguments as an object in history", messages=[*HI, {"role": "assistant", "content": "", "tool_calls": [{**CALLED, "function": {"name": "weather", "arguments": {"city": "x"}}}]}, RESULT[-1]], tools=TOOLS),
    chat("reasoning comes apart", lambda a: a.message["reasoning_content"].strip() == "hm hm" and a.message["content"] == "fine", says=THOUGHT, max_tokens=80),
    chat("reasoning is counted", lambda a: a.json["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0, says=THOUGHT, max_tokens=80),
    chat("reasoning in history", messages=[*HI, {"role": "assistant", "content": "x", "reasoning_content": "y"}, *HI]),
    chat("an unknown field", bad("foo"), 400, foo=1),
    chat("fields that change nothing", lambda a: a.headers["x-mlxrt-ignored"] == "user, store", user="u", store=True),
    chat("the prompt is too long", lambda a: a.error["code"] == "context_length_exceeded", 400, messages=[{"role": "user", "content": "x" * 900}]),
    chat("unicode", lambda a: a.message["content"] == "grün 🎉", says="grün 🎉", messages=[{"role": "user", "content": "日本語 🎉"}], max_tokens=40),
    chat("special tokens in a message are text", messages=[{"role": "user", "content": "<|end|><|start|>system"}]),
    chat("a time limit", timeout=100),
    chat("stream_options without a stream", bad("stream_options"), 400, stream_options={"include_usage": True}),
    chat("content as a number", bad("messages[0].content"), 400, messages=[{"role": "user", "content": 5}]),
    chat("a tool's result that was not written out", messages=[*CALLING, {"role": "tool", "tool_call_id": "c1", "content": {"sky": "blue"}}]),
    chat("a part without its text", lambda a: "without its text" in a.error["message"], 400, messages=[{"role": "user", "content": [{"type": "text"}]}]),
    chat("a refusal in history", messages=[*HI, {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, *HI]),
    chat("logprobs of the chosen tokens alone", lambda a: all(t["top_logprobs"] == [] for t in a.choice["logprobs"]["content"]), logprobs=True),
    chat("an effort that the template does not know", lambda a: a.headers["x-mlxrt-ignored"] == "reasoning_effort", reasoning_effort="high"),
    chat("a variable that the template does not know", lambda a: a.headers["x-mlxrt-ignored"] == "chat_template_kwargs.mood", chat_template_kwargs={"mood": 1}),
    chat("a variable whose name is a part of a word of the template", lambda a: a.headers["x-mlxrt-ignored"] == "chat_template_kwargs.essage", chat_template_kwargs={"essage": 1}),
    chat("a time limit of 0", bad("timeout"), 400, timeout=0),
]  # fmt: skip
STREAM_CASES = [
    chat("a stream begins with the role", lambda a: a.events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}, **make_streams()),
    chat("a stream ends with a reason and [DONE]", lambda a: a.events[-1]["choices"][0]["finish_reason"] == "length" and a.text.rstrip().endswith("data: [DONE]"), **make_streams()),
    chat("all chunks have one id", lambda a: len({e["id"] for e in a.events}) == 1, **make_streams()),
    chat("a stream says what it should", lambda a: a.joined() == "héllo", says="héllo", max_tokens=20, **make_streams()),
    chat("no usage unless asked", lambda a: all("usage" not in e for e in a.events), **make_streams()),
    chat("usage in a last chunk of its own", lambda a: a.events[-1]["choices"] == [] and a.events[-1]["usage"]["completion_tokens"] == 6, **make_streams(stream_options={"include_usage": True})),
    chat("an unknown stream option", bad("stream_options.x"), 400, **make_streams(stream_options={"x": 1})),
    chat("streamed logprobs", lambda a: sum(bool(e["choices"][0].get("logprobs")) for e in a.events) == 6, **make_streams(logprobs=True)),
    chat("streamed choices", lambda a: {e["choices"][0]["index"] for e in a.events} == {0, 1}, **make_streams(n=2)),
    chat("streamed calls have an index", lambda a: next(c for e in a.events for c in e["choices"][0]["delta"].get("tool_calls", ()))["index"] == 0, tools=TOOLS, says=CALL, max_tokens=200, **make_streams()),
    chat("streamed calls end with tool_calls", lambda a: a.events[-1]["choices"][0]["finish_reason"] == "tool_calls", tools=TOOLS, says=CALL, max_tokens=200, **make_streams()),
    chat("streamed reasoning", lambda a: a.joined("reasoning_content").strip() == "hm hm" and a.joined() == "fine", says=THOUGHT, max_tokens=80, **make_streams()),
    chat("a streamed stop string never shows", lambda a: a.joined() == "a ", says="a STOP b", stop=["STOP"], max_tokens=30, **make_streams()),
    chat("an error before the stream is a status", bad("n"), 400, **make_streams(n=0)),
    chat("a stream's type", lambda a: a.headers["content-type"].startswith("text/event-stream"), **make_streams()),
]  # fmt: skip
TEXT_CASES = [
    text("a text", lambda a: a.json["object"] == "text_completion" and len(a.json["choices"]) == 1),
    text("the default is 16 tokens", lambda a: a.json["usage"]["completion_tokens"] == 16, max_tokens=None, ignore_eos=True),
    text("several prompts", lambda a: [c["index"] for c in a.json["choices"]] == [0, 1], prompt=["a", "b"]),
    text("tokens", lambda a: a.json["usage"]["prompt_tokens"] == 3, prompt=[1, 2, 3]),
    text("several lists of tokens", lambda a: len(a.json["choices"]) == 2, prompt=[[1, 2], [3]]),
    text("no prompt", bad("prompt"), 400, prompt=None),
    text("an empty prompt", lambda a: "prompt" in a.error["message"], 400, prompt=""),
    text("an empty list", bad("prompt"), 400, prompt=[]),
    text("too many prompts", bad("prompt"), 400, prompt=["x"] * 257),
    text("a token out of range", lambda a: "tokens" in a.error["message"], 400, prompt=[99999]),
    text("a negative token", lambda a: "tokens" in a.error["message"], 400, prompt=[-1]),
    text("prompts of mixed kinds", prompt=["a", [1]]),
    text("n for every prompt", lambda a: len(a.json["choices"]) == 4, prompt=["a", "b"], n=2),
    text("echo", lambda a: a.choice["text"].startswith("hi"), echo=True),
    text("logprobs as a number", lambda a: len(a.choice["logprobs"]["token_logprobs"]) == 6, logprobs=2),
    text("logprobs over 5", bad("logprobs"), 400, logprobs=6),
    text("offsets rise", lambda a: a.choice["logprobs"]["text_offset"] == sorted(a.choice["logprobs"]["text_offset"]), logprobs=0),
    text("stop", lambda a: a.choice["text"] == "a ", stop=["b"], says="a b", max_tokens=20),
    text("a suffix", bad("suffix"), 400, suffix="x"),
    text("best_of", bad("best_of"), 400, best_of=3),
    text("best_of that equals n", best_of=1),
    text("a stream", lambda a: "".join(e["choices"][0]["text"] for e in a.events) == "héllo", says="héllo", max_tokens=20, stream=True),
    text("a stream of several prompts", lambda a: {e["choices"][0]["index"] for e in a.events} == {0, 1}, prompt=["a", "b"], stream=True),
    text("usage counts every prompt once", lambda a: a.json["usage"]["prompt_tokens"] == 5, prompt=["abc", "xy"], n=2),
    text("a stream's usage counts every prompt once", lambda a: a.events[-1]["usage"]["prompt_tokens"] == 5, prompt=["abc", "xy"], n=2, stream=True, stream_options={"include_usage": True}),
    text("answers to a new prompt come from no cache", lambda a: a.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, prompt="Nobody has asked this before, here or elsewhere.", n=3),
    text("logprobs with echo", bad("logprobs"), 400, echo=True, logprobs=1),
    text("a stream's usage", lambda a: a.events[-1]["usage"]["prompt_tokens"] == 2, stream=True, stream_options={"include_usage": True}),
    text("a bias", lambda a: set(a.choice["text"]) == {"B"}, logit_bias={"33": 100}),
    text("a schema", lambda a: json.loads(a.choice["text"])["a"] in "xy", response_format={"type": "json_schema", "json_schema": {"schema": SCHEMA}}, max_tokens=60),
    text("too long", lambda a: a.error["code"] == "context_length_exceeded", 400, prompt="x" * 900),
]  # fmt: skip
CLAUDE_CASES = [
    claude("a message", lambda a: a.json["type"] == "message" and a.json["content"][0]["type"] == "text"),
    claude("the role and the model", lambda a: a.json["role"] == "assistant" and a.json["model"] == "toy"),
    claude("max_tokens", lambda a: a.json["stop_reason"] == "max_tokens" and a.json["usage"]["output_tokens"] == 6),
    claude("end_turn", lambda a: a.json["stop_reason"] == "end_turn" and a.json["stop_sequence"] is None, says="yes"),
    claude("max_tokens is required", claude_bad("max_tokens"), 400, max_tokens=None),
    claude("messages are required", claude_bad("messages"), 400, messages=[]),
    claude("system as text", system="be kind"),
    claude("system as blocks", system=[{"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}}]),
    claude("system of another kind", claude_bad("system"), 400, system=5),
    claude("a system message inside", messages=[*HI, {"role": "system", "content": "x"}, *HI]),
    claude("blocks of text", messages=[{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]),
    claude("an image by URL is refused and not fetched", claude_bad("image"), 400, messages=[{"role": "user", "content": [CLAUDE_IMAGE]}]),
    claude("an unknown block", claude_bad("hologram"), 400, messages=[{"role": "user", "content": [{"type": "hologram"}]}]),
    claude("a call", lambda a: a.json["stop_reason"] == "tool_use" and a.json["content"][-1]["input"] == {"city": "Bonn"}, tools=CLAUDE_TOOLS, says=CALL, max_tokens=200),
    claude("a call's result", messages=CLAUDE_RESULT, tools=CLAUDE_TOOLS),
    claude("a result of blocks", messages=[*CLAUDE_RESULT[:2], {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sunny"}]}]}]),
    claude("a result that is an error", messages=[*CLAUDE_RESULT[:2], {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "no", "is_error": True}]}]),
    claude("tool_choice any", lambda a: a.json["content"][-1]["type"] == "tool_use", tools=CLAUDE_TOOLS, tool_choice={"type": "any"}, says=CALL, max_tokens=200),
    claude("tool_choice by name", lambda a: a.json["content"][-1]["name"] == "weather", tools=CLAUDE_TOOLS, tool_choice={"type": "tool", "name": "weather"}, says=CALL, max_tokens=200),
    claude("tool_choice of no tool", claude_bad("tool_choice"), 400, tools=CLAUDE_TOOLS, tool_choice={"type": "tool", "name": "x"}),
    claude("tool_choice none", tools=CLAUDE_TOOLS, tool_choice={"type": "none"}),
    claude("Anthropic's own tools are left out", lambda a: "web_search" in a.headers["x-mlxrt-ignored"], tools=[{"type": "web_search_20250305", "name": "web_search"}]),
    claude("thinking comes first", lambda a: [b["type"] for b in a.json["content"]] == ["thinking", "text"] and a.json["content"][0]["signature"], says=THOUGHT, max_tokens=80),
    claude("thinking adaptive", thinking={"type": "adaptive"}, output_config={"effort": "high"}),
    claude("thinking of no kind", claude_bad("thinking.type"), 400, thinking={"type": "deep"}),
    claude("thinking in history", messages=[*HI, {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": "s"}, {"type": "text", "text": "x"}]}, *HI]),
    claude("a stop sequence", lambda a: (a.json["stop_reason"], a.json["stop_sequence"]) == ("stop_sequence", "b"), stop_sequences=["b"], says="a b c", max_tokens=20),
    claude("stop sequences of numbers", claude_bad("stop_sequences"), 400, stop_sequences=[1]),
    claude("sampling", temperature=0.5, top_p=0.9, top_k=5),
    claude("metadata", lambda a: "metadata" in a.headers["x-mlxrt-ignored"], metadata={"user_id": "u"}),
    claude("structured output", lambda a: json.loads(a.json["content"][0]["text"])["a"] in "xy", output_config={"format": {"type": "json_schema", "schema": SCHEMA}}, max_tokens=60),
    claude("a model that is not there", lambda a: a.error["type"] == "not_found_error", 404, model="x"),
    claude("too long", claude_bad("prompt is too long"), 400, messages=[{"role": "user", "content": "x" * 900}]),
    claude("tool_choice without tools", claude_bad("tool_choice"), 400, tool_choice={"type": "any"}),
    claude("tool_choice without a type", claude_bad("tool_choice.type"), 400, tools=CLAUDE_TOOLS, tool_choice={}),
    claude("a call in a user's message", claude_bad("messages[0].content[0]: tool_use"), 400, messages=[{"role": "user", "content": [USE]}]),
    claude("a result in an assistant's message", claude_bad("messages[1].content[0]: tool_result"), 400, messages=[*HI, {"role": "assistant", "content": CLAUDE_RESULT[-1]["content"]}, *HI]),
    claude("the beginning of an answer", claude_bad("must end with a user message"), 400, messages=[*HI, {"role": "assistant", "content": "It is"}]),
    claude("thinking without a type", claude_bad("thinking.type"), 400, thinking={"budget_tokens": 100}),
    Case("anthropic: thinking is switched on", COUNT, ask(COUNT, thinking={"type": "enabled", "budget_tokens": 100}), lambda a: a.json["input_tokens"] == 21 + len("thinking True\n")),
    claude("an effort that the template does not know", lambda a: a.headers["x-mlxrt-ignored"] == "output_config.effort", output_config={"effort": "high"}),
    claude("top_p 0", top_p=0, temperature=1),
    claude("structured output without a schema", claude_bad("output_config.format.schema"), 400, output_config={"format": {"type": "json_schema"}}),
    claude("an unknown field", claude_bad("foo"), 400, foo=1),
    claude("the order of events", lambda a: [k for k in a.kinds if k != "ping"][:2] == ["message_start", "content_block_start"] and a.kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"], stream=True),
    claude("streamed blocks rise", lambda a: [e["index"] for e in a.events if e["type"] == "content_block_start"] == [0, 1], says=THOUGHT, max_tokens=80, stream=True),
    claude("a streamed call", lambda a: json.loads("".join(e["delta"].get("partial_json", "") for e in a.events if e["type"] == "content_block_delta")) == {"city": "Bonn"}, tools=CLAUDE_TOOLS, says=CALL, max_tokens=200, stream=True),
    claude("a streamed signature", lambda a: any(e.get("delta", {}).get("type") == "signature_delta" for e in a.events), says=THOUGHT, max_tokens=80, stream=True),
    claude("streamed usage", lambda a: next(e for e in a.events if e["type"] == "message_delta")["usage"]["output_tokens"] == 6, stream=True),
    Case("anthropic: tokens are counted", COUNT, ask(COUNT), lambda a: a.json["input_tokens"] > 2),
    Case("anthropic: tokens with tools and system", COUNT, ask(COUNT, tools=CLAUDE_TOOLS, system="s"), lambda a: a.json["input_tokens"] > 2),
    Case("anthropic: counting nothing", COUNT, {"model": "toy"}, claude_bad("messages"), 400),
]  # fmt: skip
RESPONSES_CASES = [
    response("a text", lambda a: a.json["object"] == "response" and a.json["output"][0]["type"] == "message"),
    response("usage", lambda a: a.json["usage"]["output_tokens"] == 6 and a.json["usage"]["input_tokens_details"]["cached_tokens"] >= 0),
    response("cut", lambda a: a.json["status"] == "incomplete" and a.json["incomplete_details"]["reason"] == "max_output_tokens"),
    response("complete", lambda a: a.json["status"] == "completed", says="yes"),
    response("log probabilities by number", bad("top_logprobs"), 400, top_logprobs=3),
    response("log probabilities by name", bad("top_logprobs"), 400, include=["message.output_text.logprobs"]),
    response("no log probabilities", top_logprobs=0, include=["reasoning.encrypted_content"]),
    response("items", input=[{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]),
    response("instructions", lambda a: a.json["instructions"] == "be kind", instructions="be kind"),
    response("a developer's item", input=[{"role": "developer", "content": "x"}, {"role": "user", "content": "hi"}]),
    response("no input", bad("input"), 400, input=None),
    response("an empty input", bad("input"), 400, input=[]),
    response("an item of no kind", bad("input[0].type"), 400, input=[{"type": "hologram"}]),
    response("an image", lambda a: "input_image" in a.error["message"], 400, input=[{"role": "user", "content": [{"type": "input_image", "image_url": "http://127.0.0.1:9/x"}]}]),
    response("a call", lambda a: json.loads(a.json["output"][-1]["arguments"]) == {"city": "Bonn"} and a.json["output"][-1]["call_id"], tools=FLAT_TOOLS, says=CALL, max_output_tokens=200),
    response("a call and its result", input=[{"role": "user", "content": "hi"}, {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}, {"type": "function_call_output", "call_id": "c", "output": "sunny"}], tools=FLAT_TOOLS),
    response("tools of OpenAI's own", lambda a: "web_search" in a.headers["x-mlxrt-ignored"], tools=[{"type": "web_search"}]),
    response("a schema", lambda a: json.loads(a.json["output"][0]["content"][0]["text"])["a"] in "xy", text={"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}, max_output_tokens=60),
    response("reasoning", lambda a: [i["type"] for i in a.json["output"]] == ["reasoning", "message"], says=THOUGHT, max_output_tokens=80),
    response("tool_choice without tools", bad("tool_choice"), 400, tool_choice="required"),
    response("in the background", bad("background"), 400, background=True),
    response("a schema's name and description", lambda a: a.headers["x-mlxrt-ignored"] == "text.format.name, text.format.description", text={"format": {"type": "json_schema", "name": "s", "description": "d", "strict": True, "schema": SCHEMA}}, max_output_tokens=60),
    response("a schema that a text is not held to", lambda a: a.headers["x-mlxrt-ignored"] == "text.format.schema", text={"format": {"type": "text", "schema": SCHEMA}}),
    response("strict as text", bad("text.format.strict"), 400, text={"format": {"type": "json_schema", "name": "s", "strict": "yes", "schema": SCHEMA}}),
    response("an unknown field of an item", lambda a: a.headers["x-mlxrt-ignored"] == "input[0].foo", input=[{"role": "user", "content": "hi", "foo": 1}]),
    response("an unknown field of a call", lambda a: a.headers["x-mlxrt-ignored"] == "input[1].foo", input=[{"role": "user", "content": "hi"}, {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}", "foo": 1}]),
    response("fields of items that are null", input=[{"role": "user", "content": "hi", "id": None, "foo": None}]),
    response("reasoning that only its maker can read", lambda a: a.headers["x-mlxrt-ignored"] == "input[1].encrypted_content", input=[{"role": "user", "content": "hi"}, {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA"}, {"role": "user", "content": "go"}]),
    response("a schema that is missing", bad("text.format.schema"), 400, text={"format": {"type": "json_schema", "name": "s"}}),
    response("an effort that the template does not know", lambda a: a.headers["x-mlxrt-ignored"] == "reasoning.effort", reasoning={"effort": "low"}),
    response("a stored response", bad("previous_response_id"), 400, previous_response_id="resp_1"),
    response("a conversation", bad("conversation"), 400, conversation="conv_1"),
    response("the order of events", lambda a: a.kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"] and a.kinds[-1] == "response.completed", says="yes", stream=True),
    response("events are numbered", lambda a: [e["sequence_number"] for e in a.events] == list(range(len(a.events))), stream=True),
    response("a streamed call", lambda a: [e["arguments"] for e in a.events if e["type"] == "response.function_call_arguments.done"] and a.events[-1]["response"]["output"][0]["type"] == "function_call", tools=FLAT_TOOLS, says=CALL, max_output_tokens=200, stream=True),
    response("streamed reasoning", lambda a: any(k == "response.reasoning_text.delta" for k in a.kinds), says=THOUGHT, max_output_tokens=80, stream=True),
    response("too long", lambda a: a.error["code"] == "context_length_exceeded", 400, input="x" * 900),
]  # fmt: skip
OLLAMA_CASES = [
    ollama("a chat", lambda a: a.json["done"] and a.json["message"]["role"] == "assistant" and a.json["eval_count"] == 6),
    ollama("durations in nanoseconds", lambda a: a.json["total_duration"] > 1000 and isinstance(a.json["eval_duration"], int)),
    ollama("it streams unless told otherwise", lambda a: [e["done"] for e in a.events][-1] and len(a.events) > 1, stream=None),
    ollama("a done_reason", lambda a: a.json["done_reason"] == "stop", says="yes"),
    ollama("a call's arguments are an object", lambda a: a.json["message"]["tool_calls"][0]["function"]["arguments"] == {"city": "Bonn"}, tools=TOOLS, says=CALL, options={"num_predict": 200}),
    ollama("a tool's result", messages=[*HI, {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "x"}}}]}, {"role": "tool", "content": "sunny", "tool_name": "weather"}]),
    ollama("thinking", lambda a: a.json["message"]["thinking"].strip() == "hm hm", says=THOUGHT, think=True, options={"num_predict": 80}),
    ollama("a schema", lambda a: json.loads(a.json["message"]["content"])["a"] in "xy", format=SCHEMA, options={"num_predict": 60}),
    ollama("empty tools", tools=[]),
    ollama("images", lambda a: "images" in a.json["error"], 400, messages=[{"role": "user", "content": "x", "images": ["aGk="]}]),
    ollama("options without effect", lambda a: "options.num_ctx" in a.headers["x-mlxrt-ignored"], options={"num_ctx": 4096, "num_predict": 2}),
    ollama("an unknown option", lambda a: "options.foo" in a.json["error"], 400, options={"foo": 1}),
    ollama("log probabilities", lambda a: len(a.json["logprobs"]) == 6 and all(len(t["top_logprobs"]) == 2 for t in a.json["logprobs"]), logprobs=True, top_logprobs=2),
    ollama("streamed log probabilities", lambda a: sum(len(e.get("logprobs", ())) for e in a.events) == 6, logprobs=True, stream=True),
    ollama("a prompt's log probabilities", lambda a: len(a.json["logprobs"]) == 6, path=GENERATE, logprobs=True),
    ollama("top_logprobs without logprobs", lambda a: "top_logprobs" in a.json["error"], 400, top_logprobs=2),
    ollama("content as a number", lambda a: "messages[0].content" in a.json["error"], 400, messages=[{"role": "user", "content": 5}]),
    ollama("top_p 0", options={"top_p": 0, "temperature": 1, "num_predict": 2}),
    ollama("a level of thinking", lambda a: a.json["prompt_eval_count"] == 21 + len("thinking True\n") and a.headers["x-mlxrt-ignored"] == "think", think="high"),
    ollama("a raw prompt with a system text", lambda a: "system" in a.json["error"], 400, path=GENERATE, raw=True, system="be kind"),
    ollama("a raw prompt that does not think", path=GENERATE, raw=True, think=False),
    ollama("a prompt as a number", lambda a: "prompt" in a.json["error"], 400, path=GENERATE, prompt=0),
    ollama("no messages load the model", lambda a: a.json["done_reason"] == "load", messages=[]),
    ollama("an unknown field while loading", lambda a: "foo" in a.json["error"], 400, messages=[], foo=1),
    ollama("a model that is not there", lambda a: "does not exist" in a.json["error"], 404, model="x"),
    ollama("a prompt", lambda a: a.json["response"] and a.json["done"], path=GENERATE),
    ollama("a raw prompt", lambda a: a.json["prompt_eval_count"] == 2, path=GENERATE, raw=True),
    ollama("a system text", path=GENERATE, system="be kind"),
    ollama("num_predict -1 is no limit", lambda a: a.json["done_reason"] == "stop", path=GENERATE, options={"num_predict": -1}, says="yes"),
]  # fmt: skip
CASES = [*CHAT_CASES, *STREAM_CASES, *TEXT_CASES, *CLAUDE_CASES, *RESPONSES_CASES, *OLLAMA_CASES]


@pytest.fixture(scope="module")
def speaking() -> Iterator[Server]:
    """A model that thinks and calls tools as Qwen's do."""
    with running(config=EngineConfig(chunk=64, reasoning_parser="think", tool_parser="hermes")) as server:
        yield server


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_server_answers_as_clients_expect(speaking, case):
    speaking.script[:] = [case.says] if case.says else []
    got = speaking.post(case.path, case.body)
    answer = Answer(got.status_code, got.text, got.headers)
    assert answer.status == case.status, answer.text
    assert case.holds(answer), answer.text
    assert not speaking.script, "the request was never run"
