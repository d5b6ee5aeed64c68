"""OpenAI's chat completions: /v1/chat/completions."""

import json
import secrets
from dataclasses import replace
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ..engine.async_engine import AsyncEngine
from ..engine.request import Completion, Event, Finish, Logprobs, Request, Timings
from ..text import Tokenizer
from .answering import Call, answer, now, open_call, read_body
from .options import (
    MAX_CHOICES,
    choose_effort,
    choose_tool,
    read_response_format,
    read_sampling,
    read_stop,
    read_timeout,
)
from .problem import Fields, Problem, encode_json, kind_of, write_openai

# What clients send and what changes nothing here. Everything else that is unknown is refused by name.
IGNORED = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "verbosity", "prediction", "web_search_options", "enable_caching", "cache_prompt", "extra_body",
)  # fmt: skip
FINISH = {Finish.STOP: "stop", Finish.LENGTH: "length", Finish.DEADLINE: "length", Finish.CANCELLED: "stop"}
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


async def chat_completions(http: HttpRequest) -> Response:
    body = await read_body(http)
    name = body.text("model")
    include_usage, writer = read_stream_options(body), ChatWriter()

    def make(engine: AsyncEngine) -> Call:
        call = read_chat(body, engine)
        top = body.integer("top_logprobs") or 0
        writer.prepare(name or engine.engine.source.name, engine.engine.tokenizer, call, include_usage, top)
        return call

    return await answer(http, await open_call(http, name, make), writer)


def read_stream_options(body: Fields) -> bool:
    """Whether the last chunk tells the usage."""
    options = body.inner("stream_options")
    if options is None:
        return False
    include = options.flag("include_usage")
    options.ignore("include_obfuscation", "continuous_usage_stats")
    options.finish()
    if not body.flag("stream"):
        raise body.fail("stream_options", "only with stream: true")
    return include


def read_chat(body: Fields, engine: AsyncEngine) -> Call:
    messages = body.items("messages")
    if not messages:
        raise body.fail("messages", "expected a list of one or more messages")
    for i, message in enumerate(messages):
        check_message(body, i, message)
        if message.get("content") is None and message.get("role") in ("user", "system", "developer"):
            raise body.fail(f"messages[{i}].content", "is required")
    count = body.integer("n", 1, MAX_CHOICES) or 1
    wants, top = body.flag("logprobs"), body.integer("top_logprobs", 0, 20) or 0
    if top and not wants:
        raise body.fail("top_logprobs", "needs logprobs: true")
    limits = [v for v in (body.integer("max_completion_tokens", 1), body.integer("max_tokens", 1)) if v is not None]
    given: dict[str, Any] = {"logprobs": max(top, 1) if wants else 0, "stop": read_stop(body, "stop")}
    params = read_sampling(body, engine, given, limits[0] if limits else None)
    request = Request(
        messages=tuple(messages),
        params=params,
        deadline_s=read_timeout(body),
        cache_salt=body.text("cache_salt") or "",
        **read_tools(body),
        **read_template(body, engine),
        **read_response_format(body),
    )
    if body.raw("functions") is not None or body.raw("function_call") is not None:
        raise body.fail("functions", "is the old form; give tools and tool_choice")
    modalities = body.items("modalities")
    if modalities is not None and modalities != ["text"]:
        raise body.fail("modalities", "only text is answered")
    body.ignore(*IGNORED)
    stream = body.flag("stream")
    body.finish()
    return Call(spread(request, count), stream, body.ignored)


def check_message(body: Fields, i: int, message: Any) -> None:
    """Its content is text or parts; only a tool's result may be a value that was not written out."""
    if not isinstance(message, dict):
        raise body.fail(f"messages[{i}]", "expected an object")
    content = message.get("content")
    if content is not None and not isinstance(content, (str, list)) and message.get("role") not in ("tool", "function"):
        raise body.fail(f"messages[{i}].content", f"expected a string or a list of parts, not {kind_of(content)}")


def spread(request: Request, count: int) -> list[Request]:
    """The request `count` times; of a seeded one every copy draws differently, and the first as it would alone."""
    seed = request.params.seed
    if count == 1 or seed is None:
        return [request] * count
    return [replace(request, params=replace(request.params, seed=(seed + i) % 2**64)) for i in range(count)]


def read_tools(body: Fields) -> dict[str, Any]:
    """`tools`, `tool_choice` and `parallel_tool_calls` as fields of a Request."""
    tools, choice = body.items("tools", 1024), body.raw("tool_choice")
    parallel = body.flag("parallel_tool_calls", True)
    if not tools:
        if choice not in (None, "none", "auto"):
            raise body.fail("tool_choice", "needs tools")
        return {}
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise body.fail(f"tools[{i}]", 'expected {"type": "function", "function": {"name": ...}}')
    if choice == "none":
        return {}
    return {
        "tools": tuple(tools),
        **read_tool_choice(body, choice, tools),
        **({} if parallel else {"parallel_tool_calls": False}),
    }


def read_tool_choice(body: Fields, choice: Any, tools: list[dict[str, Any]]) -> dict[str, Any]:
    if choice in (None, "auto"):
        return {}
    if choice == "required":
        return {"tool_choice": "required"}
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise body.fail(
            "tool_choice", 'expected none, auto, required or {"type": "function", "function": {"name": ...}}'
        )
    return choose_tool(body, "tool_choice", name, tools)


def read_template(body: Fields, engine: AsyncEngine) -> dict[str, Any]:
    """Thinking and the template's variables as fields of a Request."""
    takes = engine.engine.tokenizer.chat_format.takes
    options = body.object("chat_template_kwargs") or {}
    body.ignored += [f"chat_template_kwargs.{key}" for key in options if not takes(key)]
    found: dict[str, Any] = {}
    effort = body.text("reasoning_effort", EFFORTS)
    budget = (
        body.integer("thinking_budget", 0)
        if "thinking_budget" in body.data
        else body.integer("thinking_token_budget", 0)
    )
    if effort == "none":
        found["thinking"] = "off"
    else:
        options = {**choose_effort(body, "reasoning_effort", effort, engine), **options}
    if budget is not None:
        found["thinking_budget"] = budget
    return {**found, **({"template_options": options} if options else {})}


class ChatWriter:
    """Writes chunks from prepared bytes: a token costs the JSON of its own text and nothing more."""

    media_type = "text/event-stream"

    def __init__(self) -> None:
        self.id, self.created = f"chatcmpl-{secrets.token_hex(14)}", now()

    def prepare(self, model: str, tokenizer: Tokenizer, call: Call, include_usage: bool, top: int) -> None:
        """`top`: how many of the likeliest tokens are told with each chosen one, where these are asked for at all."""
        self._model, self._tokenizer, self._include_usage = model, tokenizer, include_usage
        self._choices = len(call.requests)
        self._top = top
        frame = {"id": self.id, "object": "chat.completion.chunk", "created": self.created, "model": model}
        self._head = b"data: " + encode_json(frame)[:-1] + b',"choices":['
        self._called = [False] * self._choices
        self._usage = Usage()

    def begin(self, prompt_tokens: int) -> bytes:
        delta = {"role": "assistant", "content": ""}
        return b"".join(self._frame(i, delta) for i in range(self._choices))

    def _frame(self, index: int, delta: dict[str, Any], finish: str | None = None, logprobs: Any = None) -> bytes:
        choice: dict[str, Any] = {"index": index, "delta": delta, "finish_reason": finish}
        if logprobs is not None:
            choice["logprobs"] = logprobs
        return self._head + encode_json(choice) + b"]}\n\n"

    def chunk(self, index: int, event: Event) -> bytes:
        out, self._usage = b"", self._usage.add(event)
        if event.tool_call is not None:
            self._called[index] |= event.tool_call.complete is not None
            named = event.tool_call.name is not None or event.tool_call.arguments
            delta = {"tool_calls": [write_call_delta(event.tool_call)]} if named else {}
            if delta or event.logprobs:
                out = self._frame(index, delta, logprobs=self._logprobs(event))
        elif event.text or event.logprobs:
            out = self._text(index, event)
        if event.finish_reason is not None:
            finish = (
                "tool_calls"
                if self._called[index] and event.finish_reason is Finish.STOP
                else FINISH[event.finish_reason]
            )
            out += self._frame(index, {}, finish)
        return out

    def _text(self, index: int, event: Event) -> bytes:
        field = "reasoning_content" if event.kind == "reasoning" else "content"
        if event.logprobs:
            return self._frame(index, {field: event.text}, logprobs=self._logprobs(event))
        text = json.dumps(event.text).encode()
        return b'%b{"index":%d,"delta":{"%b":%b},"finish_reason":null}]}\n\n' % (
            self._head,
            index,
            field.encode(),
            text,
        )

    def _logprobs(self, event: Event) -> dict[str, Any] | None:
        if not event.logprobs:
            return None
        return {"content": [write_logprobs(self._tokenizer, event.logprobs, self._top)], "refusal": None}

    def end(self) -> bytes:
        return write_end(self._head, self._usage if self._include_usage else None)

    def keep_alive(self) -> bytes:
        return KEEP_ALIVE

    def failure(self, problem: Problem) -> bytes:
        return write_failure(problem)

    def write_body(self, completions: list[Completion]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self._model,
            "choices": [self._choice(i, done) for i, done in enumerate(completions)],
            "usage": Usage.of(completions).write(),
        }

    def _choice(self, index: int, done: Completion) -> dict[str, Any]:
        calls = [write_call(call) for call in done.tool_calls]
        message: dict[str, Any] = {
            "role": "assistant",
            "content": done.text or (None if calls else ""),
            "refusal": None,
        }
        if done.reasoning:
            message["reasoning_content"] = done.reasoning
        if calls:
            message["tool_calls"] = calls
        finish = "tool_calls" if calls and done.finish_reason is Finish.STOP else FINISH[done.finish_reason]
        logprobs = [write_logprobs(self._tokenizer, one, self._top) for one in done.logprobs]
        return {
            "index": index,
            "message": message,
            "logprobs": {"content": logprobs, "refusal": None} if logprobs else None,
            "finish_reason": finish,
        }


def write_call(call: Any) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def write_call_delta(delta: Any) -> dict[str, Any]:
    """The first delta of a call has its id and name; the arguments are text in any case."""
    function = {"arguments": delta.arguments or ""}
    if delta.name is None:
        return {"index": delta.index, "function": function}
    return {"index": delta.index, "id": delta.id, "type": "function", "function": {"name": delta.name} | function}


def write_logprobs(tokenizer: Tokenizer, logprobs: Logprobs, top: int) -> dict[str, Any]:
    best = sorted(logprobs, key=lambda pair: (-pair[1], pair[0]))[:top]
    return write_logprob(tokenizer, *logprobs[0]) | {"top_logprobs": [write_logprob(tokenizer, *pair) for pair in best]}


def write_logprob(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token) if token < tokenizer.vocab_size else b""
    return {"token": raw.decode("utf-8", "replace"), "logprob": max(logprob, -9999.0), "bytes": list(raw)}


KEEP_ALIVE = b": keep-alive\n\n"  # a comment: every client skips it


def write_end(head: bytes, usage: "Usage | None") -> bytes:
    """The last frames of a stream, the usage only where it was asked for."""
    counted = head + b'],"usage":' + encode_json(usage.write()) + b"}\n\n" if usage is not None else b""
    return counted + b"data: [DONE]\n\n"


def write_failure(problem: Problem) -> bytes:
    return b"data: " + encode_json(write_openai(problem, "")) + b"\n\n"


class Usage:
    """Counts of tokens over all requests of a call. The answers to one prompt count it once, as OpenAI does."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, int]] = {}  # which prompt -> its tokens, how many came from the cache
        self.generated = self.reasoning = 0

    def add(self, event: Event, prompt: int = 0) -> "Usage":
        if event.timings is not None:
            self._count(event.timings, prompt)
        return self

    def _count(self, timings: Timings, prompt: int) -> None:
        # Of several answers the first one computed the prompt; the others found it in the cache.
        tokens, cached = self._prompts.get(prompt, (0, timings.cached_tokens))
        self._prompts[prompt] = max(tokens, timings.prompt_tokens), min(cached, timings.cached_tokens)
        self.generated += timings.generated_tokens
        self.reasoning += timings.reasoning_tokens

    @classmethod
    def of(cls, completions: list[Completion], copies: int | None = None) -> "Usage":
        """`copies`: answers to each prompt; None: all are answers to one."""
        usage = cls()
        for i, done in enumerate(completions):
            usage._count(done.timings, 0 if copies is None else i // copies)
        return usage

    @property
    def prompt(self) -> int:
        return sum(tokens for tokens, _ in self._prompts.values())

    @property
    def cached(self) -> int:
        return sum(cached for _, cached in self._prompts.values())

    def write(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.generated,
            "total_tokens": self.prompt + self.generated,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        }
