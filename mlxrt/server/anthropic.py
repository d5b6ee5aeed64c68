"""Anthropic's messages: /v1/messages and /v1/messages/count_tokens."""

import json
import secrets
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ..engine.async_engine import AsyncEngine
from ..engine.request import Completion, Event, Finish, Request
from ..text.parsing.segments import ToolCall
from .answering import Call, answer, open_call, prepare, read_body, reply
from .openai_chat import Usage
from .options import choose_effort, choose_tool, make_params, read_stop, read_timeout
from .problem import Fields, Problem, encode_json, write_anthropic

IGNORED = (
    "metadata",
    "service_tier",
    "context_management",
    "container",
    "mcp_servers",
    "betas",
    "inference_geo",
    "cache_control",
)
BILLING = "x-anthropic-billing-header:"  # a system block of Claude Code that changes with every prompt
BLOCKS = {  # which kinds of blocks a message of each role may hold
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
PREFILL = "This model does not support assistant message prefill. The conversation must end with a user message."
TEXT_ONLY = "only text is answered; this server has no model for"


async def messages(http: HttpRequest) -> Response:
    body = await read_body(http)
    name, writer = body.text("model"), MessageWriter()

    def make(engine: AsyncEngine) -> Call:
        if body.integer("max_tokens", 1) is None:
            raise body.fail("max_tokens", "is required")
        last = (body.items("messages") or [None])[-1]
        if isinstance(last, dict) and last.get("role") == "assistant":
            raise body.fail("messages", PREFILL)
        writer.prepare(name or engine.engine.source.name)
        return read_messages(body, engine)

    return await answer(http, await open_call(http, name, make), writer)


async def count_tokens(http: HttpRequest) -> Response:
    body = await read_body(http)
    async with http.app.state.models.use(body.text("model")) as (_, engine):
        [tokens] = await prepare(http, engine, read_messages(body, engine).requests, compiles=False)
    return reply({"input_tokens": len(tokens)})


def read_messages(body: Fields, engine: AsyncEngine) -> Call:
    items = body.items("messages")
    if not items:
        raise body.fail("messages", "expected a list of one or more messages")
    history = read_system(body)
    for i, item in enumerate(items):
        if not isinstance(item, dict):
            raise body.fail(f"messages[{i}]", "expected an object")
        history += read_message(Fields(item, f"messages[{i}]", body.ignored))
    params = make_params(
        engine,
        {
            "temperature": body.number("temperature", 0, 1e6),
            "top_p": body.number("top_p", 0, 1),
            "top_k": body.integer("top_k", 0, 1 << 30),
            "stop": read_stop(body, "stop_sequences"),
        },
        body.integer("max_tokens", 1),
    )
    options = {**read_tools(body), **read_thinking(body, engine)}
    request = Request(messages=tuple(history), params=params, deadline_s=read_timeout(body), **options)
    body.ignore(*IGNORED)
    stream = body.flag("stream")
    body.finish()
    return Call([request], stream, body.ignored)


def read_system(body: Fields) -> list[dict[str, Any]]:
    value = body.raw("system")
    if value is None or value == "" or value == []:
        return []
    texts = (
        [value]
        if isinstance(value, str)
        else [read_text(body, "system", i, b) for i, b in enumerate(as_list(body, "system", value))]
    )
    texts = [text for text in texts if not text.startswith(BILLING)]
    return [{"role": "system", "content": "\n\n".join(texts)}] if texts else []


def as_list(body: Fields, key: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise body.fail(key, "expected a string or a list of blocks")
    return value


def read_text(body: Fields, key: str, i: int, block: Any) -> str:
    if not isinstance(block, dict) or block.get("type") != "text" or not isinstance(block.get("text"), str):
        kind = block.get("type") if isinstance(block, dict) else type(block).__name__
        raise body.fail(f"{key}[{i}]", f"expected a text block, not {str(kind)[:40]!r}")
    return block["text"]


def read_message(item: Fields) -> list[dict[str, Any]]:
    """One of Anthropic's messages as one or more of ours: tool results are messages of their own."""
    role, content = item.text("role", ("user", "assistant", "system")), item.raw("content")
    item.finish()
    if role is None:
        raise item.fail("role", "is required")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    texts, thoughts, calls, results = [], [], [], []
    for i, block in enumerate(as_list(item, "content", content)):
        path = f"content[{i}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind not in BLOCKS[role] and any(kind in kinds for kinds in BLOCKS.values()):
            raise item.fail(path, f"{kind} blocks do not go into a message of the {role}")
        if kind == "text":
            texts.append(read_text(item, "content", i, block))
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking", "")))
        elif kind == "redacted_thinking":
            continue
        elif kind == "tool_use":
            calls.append(read_tool_use(item, path, block))
        elif kind == "tool_result":
            results.append(read_tool_result(item, path, block))
        else:
            raise item.fail(path, f"{TEXT_ONLY} blocks of type {str(kind)[:40]!r}")
    if role == "assistant":
        message: dict[str, Any] = {"role": role, "content": "".join(texts)}
        if thoughts:
            message["reasoning_content"] = "\n".join(thoughts)
        if calls:
            message["tool_calls"] = calls
        return [message]
    return [*results, *([{"role": role, "content": "\n\n".join(texts)}] if texts or not results else [])]


def read_tool_use(item: Fields, path: str, block: dict[str, Any]) -> dict[str, Any]:
    name, given = block.get("name"), block.get("input")
    if not isinstance(name, str) or not isinstance(given, dict):
        raise item.fail(path, "a tool_use block needs a name and an input object")
    return {"id": str(block.get("id", "")), "type": "function", "function": {"name": name, "arguments": given}}


def read_tool_result(item: Fields, path: str, block: dict[str, Any]) -> dict[str, Any]:
    content = block.get("content", "")
    if isinstance(content, list):
        content = "\n".join(read_text(item, f"{path}.content", i, b) for i, b in enumerate(content))
    if content is None:
        content = ""
    if not isinstance(content, str):
        raise item.fail(path, "the content of a tool_result is a string or a list of text blocks")
    if block.get("is_error"):
        content = f"Error: {content}"
    return {"role": "tool", "tool_call_id": str(block.get("tool_use_id", "")), "content": content}


def read_tools(body: Fields) -> dict[str, Any]:
    given, choice = body.items("tools", 1024), body.inner("tool_choice")
    kind = name = None
    parallel = True
    if choice is not None:
        kind, name = choice.text("type", ("auto", "any", "tool", "none")), choice.text("name")
        parallel = not choice.flag("disable_parallel_tool_use")
        choice.finish()
    tools: list[dict[str, Any]] = []
    for i, tool in enumerate(given or ()):
        if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
            raise body.fail(f"tools[{i}]", "expected an object with a name")
        if "input_schema" not in tool:  # a tool that Anthropic's own servers run
            body.ignored.append(f"tools[{i}] ({tool['name'][:40]})")
            continue
        function = {
            "name": tool["name"],
            "description": tool.get("description", ""),
            "parameters": tool["input_schema"],
        }
        tools.append({"type": "function", "function": function})
    if choice is not None and kind is None:
        raise choice.fail("type", "is required")
    if not tools and kind in ("any", "tool"):
        raise body.fail("tool_choice", "needs tools that a client runs")
    if not tools or kind == "none":
        return {}
    found: dict[str, Any] = {"tools": tuple(tools)}
    if kind == "any":
        found["tool_choice"] = "required"
    elif kind == "tool":
        found |= choose_tool(body, "tool_choice.name", name, tools)
    return found if parallel else found | {"parallel_tool_calls": False}


def read_thinking(body: Fields, engine: AsyncEngine) -> dict[str, Any]:
    """`thinking` and `output_config` as fields of a Request."""
    found: dict[str, Any] = {}
    thinking, config = body.inner("thinking"), body.inner("output_config")
    if thinking is not None:
        kind = thinking.text("type", ("enabled", "disabled", "adaptive"))
        budget = thinking.integer("budget_tokens", 1)
        thinking.ignore("display")
        thinking.finish()
        if kind is None:
            raise thinking.fail("type", "is required")
        if kind == "enabled":
            found["thinking"] = "on"
        if kind == "disabled":
            found["thinking"] = "off"
        elif budget is not None:
            found["thinking_budget"] = budget
    if config is not None:
        form = config.inner("format")
        if variables := choose_effort(config, "effort", config.text("effort"), engine):
            found["template_options"] = variables
        if form is not None:
            form.text("type", ("json_schema",))
            if (schema := form.object("schema")) is None:
                raise form.fail("schema", "is required")
            found["response_format"] = {"type": "json_schema", "schema": schema}
            form.finish()
        config.finish()
    return found


class MessageWriter:
    """Writes blocks: each begins, has deltas and stops, with a rising index."""

    media_type = "text/event-stream"

    def __init__(self) -> None:
        self.id = f"msg_{secrets.token_hex(12)}"
        self._block, self._index, self._calls = "", -1, 0
        self._usage = Usage()

    def prepare(self, model: str) -> None:
        self._model = model

    def _frame(self, kind: str, data: dict[str, Any]) -> bytes:
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode_json({"type": kind, **data}))

    def begin(self, prompt_tokens: int) -> bytes:
        usage = {
            "input_tokens": prompt_tokens,
            "output_tokens": 0,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
        }
        message: dict[str, Any] = {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
        }
        message |= {"stop_reason": None, "stop_sequence": None, "usage": usage}
        return self._frame("message_start", {"message": message})

    def _open(self, block: str, content: dict[str, Any]) -> bytes:
        out = self._close()
        self._block, self._index = block, self._index + 1
        return out + self._frame("content_block_start", {"index": self._index, "content_block": content})

    def _close(self) -> bytes:
        if not self._block:
            return b""
        out = b""
        if self._block == "thinking":  # clients keep a signature and send it back
            out = self._delta({"type": "signature_delta", "signature": self.id})
        self._block = ""
        return out + self._frame("content_block_stop", {"index": self._index})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return self._frame("content_block_delta", {"index": self._index, "delta": delta})

    def chunk(self, index: int, event: Event) -> bytes:
        out, self._usage = b"", self._usage.add(event)
        if event.tool_call is not None:
            call = event.tool_call
            self._calls += call.complete is not None
            if call.name is not None:
                content = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
                out += self._open("tool_use", content)
            if call.arguments:
                out += self._delta({"type": "input_json_delta", "partial_json": call.arguments})
        elif event.text:
            out += self._text(event)
        if event.finish_reason is not None:
            out += self._finish(event)
        return out

    def _text(self, event: Event) -> bytes:
        block = "thinking" if event.kind == "reasoning" else "text"
        out = b""
        if self._block != block:
            empty = (
                {"type": "thinking", "thinking": "", "signature": ""}
                if block == "thinking"
                else {"type": "text", "text": ""}
            )
            out = self._open(block, empty)
        text = json.dumps(event.text).encode()
        name = block.encode()
        delta = b'{"type":"%b_delta","%b":%b}' % (name, name, text)
        body = b'{"type":"content_block_delta","index":%d,"delta":%b}' % (self._index, delta)
        return out + b"event: content_block_delta\ndata: %b\n\n" % body

    def _finish(self, event: Event) -> bytes:
        reason, stop = stop_reason(event, bool(self._calls))
        return self._close() + self._frame(
            "message_delta",
            {"delta": {"stop_reason": reason, "stop_sequence": stop}, "usage": write_usage(self._usage)},
        )

    def end(self) -> bytes:
        return self._frame("message_stop", {})

    def keep_alive(self) -> bytes:
        return self._frame("ping", {})

    def failure(self, problem: Problem) -> bytes:
        return b"event: error\ndata: %b\n\n" % encode_json(write_anthropic(problem, ""))

    def write_body(self, completions: list[Completion]) -> dict[str, Any]:
        [done] = completions
        content: list[dict[str, Any]] = []
        if done.reasoning:
            content.append({"type": "thinking", "thinking": done.reasoning, "signature": self.id})
        if done.text or not done.tool_calls:
            content.append({"type": "text", "text": done.text})
        content += [write_tool_use(call) for call in done.tool_calls]
        reason, stop = stop_reason(done, bool(done.tool_calls))
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": write_usage(Usage.of([done])),
        }


def write_tool_use(call: ToolCall) -> dict[str, Any]:
    """A call as a block. A stream gives the text of broken arguments as it comes; here an object has to hold it, under
    the key that Anthropic's own documentation gives such text."""
    given = call.parsed if call.parsed is not None else {"INVALID_JSON": call.arguments}
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": given}


def stop_reason(ended: Event | Completion, called: bool) -> tuple[str, str | None]:
    if ended.stop_string is not None:
        return "stop_sequence", ended.stop_string
    if ended.finish_reason not in (Finish.STOP, Finish.CANCELLED):
        return "max_tokens", None
    return ("tool_use" if called else "end_turn"), None


def write_usage(usage: Usage) -> dict[str, Any]:
    """`input_tokens` leaves out what came from the cache: clients add the two."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_read_input_tokens": usage.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.generated,
    }
