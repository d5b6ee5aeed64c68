"""OpenAI's responses: /v1/responses. Stateless: nothing is stored, so `previous_response_id` is refused by name."""

import secrets
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ..engine.async_engine import AsyncEngine
from ..engine.request import Completion, Event, Finish, Request
from .answering import Call, answer, now, open_call, read_body
from .openai_chat import EFFORTS, KEEP_ALIVE, Usage
from .options import choose_effort, choose_tool, read_sampling, read_timeout
from .problem import Fields, Problem, encode_json

IGNORED = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "include", "truncation", "top_logprobs", "max_tool_calls", "stream_options", "client_metadata",
    "context_management",
)  # fmt: skip

LOGPROBS = "message.output_text.logprobs"  # what `include` calls them
# What clients send back of an item that an earlier response had: its text says all that a model can read.
ECHOED = (
    "id", "status", "phase", "annotations", "logprobs", "parsed_arguments", "created_by", "end_turn",
)  # fmt: skip


async def responses(http: HttpRequest) -> Response:
    body = await read_body(http)
    name, writer = body.text("model"), ResponseWriter()

    def make(engine: AsyncEngine) -> Call:
        call = read_response(body, engine)
        writer.prepare(name or engine.engine.source.name, call, body.data)
        return call

    return await answer(http, await open_call(http, name, make), writer)


def read_response(body: Fields, engine: AsyncEngine) -> Call:
    for key in ("previous_response_id", "conversation", "prompt"):
        if body.raw(key) is not None:
            raise body.fail(key, "is not supported: nothing is stored here; send the whole conversation as input")
    if body.flag("background"):
        raise body.fail("background", "is not supported: an answer is kept for nobody; wait for it or stream it")
    instructions = body.text("instructions")
    history = [{"role": "system", "content": instructions}] if instructions else []
    history += read_input(body)
    params = read_sampling(body, engine, {}, body.integer("max_output_tokens", 1))
    request = Request(
        messages=tuple(history),
        params=params,
        deadline_s=read_timeout(body),
        **read_tools(body),
        **read_reasoning(body, engine),
        **read_text_format(body),
    )
    included = body.raw("include")
    if body.integer("top_logprobs", 0) or (isinstance(included, list) and LOGPROBS in included):
        raise body.fail("top_logprobs", "is not supported here; /v1/chat/completions answers with log probabilities")
    body.ignore(*IGNORED)
    stream = body.flag("stream")
    body.finish()
    return Call([request], stream, body.ignored)


def read_input(body: Fields) -> list[dict[str, Any]]:
    value = body.raw("input")
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise body.fail("input", "expected a string or a list of items")
    history: list[dict[str, Any]] = []
    for i, item in enumerate(value):
        if not isinstance(item, dict):
            raise body.fail(f"input[{i}]", "expected an object")
        given = {key: value for key, value in item.items() if value is not None}  # OpenAI's package sends what it knows
        add_item(history, Fields(given, f"input[{i}]", body.ignored))
    return history


def add_item(history: list[dict[str, Any]], item: Fields) -> None:
    """Add one item to the messages; calls and reasoning join the assistant's message they belong to."""
    kind = item.text("type") or "message"
    for key in ECHOED:
        item.raw(key)
    if kind == "message":
        role = item.text("role", ("user", "assistant", "system", "developer"))
        if role is None:
            raise item.fail("role", "is required")
        text = read_content(item)
        if role == "assistant":
            message = assistant(history)
            message["content"] = message["content"] + text
        else:
            history.append({"role": role, "content": text})
    elif kind == "function_call":
        function = {"name": item.text("name") or "", "arguments": item.text("arguments") or "{}"}
        call = {"id": item.text("call_id") or "", "type": "function", "function": function}
        item.ignore("namespace", "caller", "async")
        assistant(history).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        item.ignore("name", "namespace", "caller")
        history.append(
            {"role": "tool", "tool_call_id": item.text("call_id") or "", "content": read_content(item, "output")}
        )
    elif kind == "reasoning":
        item.ignore("encrypted_content")
        content, summary = item.items("content"), item.items("summary")
        parts = content or summary or []
        text = "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))
        if text:
            message = assistant(history)
            message["reasoning_content"] = message.get("reasoning_content", "") + text
    else:
        raise item.fail("type", f"items of type {kind[:40]!r} are not supported")
    item.ignore_rest()  # clients send back whatever items they were given, by any server


def assistant(history: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message at the end of the history."""
    if not history or history[-1]["role"] != "assistant":
        history.append({"role": "assistant", "content": ""})
    return history[-1]


def read_content(item: Fields, key: str = "content") -> str:
    value = item.raw(key)
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise item.fail(key, "expected a string or a list of parts")
    texts = []
    for i, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("input_text", "output_text", "text", "refusal"):
            raise item.fail(f"{key}[{i}]", f"only text is answered, not parts of type {str(kind)[:40]!r}")
        texts.append(str(part.get("text", part.get("refusal", ""))))
    return "".join(texts)


def read_tools(body: Fields) -> dict[str, Any]:
    given, choice = body.items("tools", 1024), body.raw("tool_choice")
    parallel = body.flag("parallel_tool_calls", True)
    tools: list[dict[str, Any]] = []
    for i, tool in enumerate(given or ()):
        if not isinstance(tool, dict):
            raise body.fail(f"tools[{i}]", "expected an object")
        if tool.get("type") != "function":  # tools that OpenAI's own servers run
            body.ignored.append(f"tools[{i}] ({str(tool.get('type'))[:40]})")
            continue
        if not isinstance(tool.get("name"), str):
            raise body.fail(f"tools[{i}].name", "expected a string")
        function = {
            key: tool[key] for key in ("name", "description", "parameters", "strict") if tool.get(key) is not None
        }
        tools.append({"type": "function", "function": function})
    if not tools and choice not in (None, "auto", "none"):
        raise body.fail("tool_choice", "needs tools that a client runs")
    if not tools or choice == "none":
        return {}
    found: dict[str, Any] = {"tools": tuple(tools)}
    if choice == "required":
        found["tool_choice"] = "required"
    elif isinstance(choice, dict) and choice.get("type") == "function":
        found |= choose_tool(body, "tool_choice", choice.get("name"), tools)
    elif choice not in (None, "auto"):
        raise body.fail("tool_choice", "expected none, auto, required or a function")
    return found if parallel else found | {"parallel_tool_calls": False}


def read_reasoning(body: Fields, engine: AsyncEngine) -> dict[str, Any]:
    options = body.inner("reasoning")
    if options is None:
        return {}
    effort = options.text("effort", EFFORTS)
    options.ignore("summary", "generate_summary")
    options.finish()
    if effort == "none":
        return {"thinking": "off"}
    variables = choose_effort(options, "effort", effort, engine)
    return {"template_options": variables} if variables else {}


def read_text_format(body: Fields) -> dict[str, Any]:
    options = body.inner("text")
    form = options.inner("format") if options is not None else None
    if options is not None:
        options.ignore("verbosity")
        options.finish()
    if form is None:
        return {}
    kind = form.text("type", ("text", "json_object", "json_schema"))
    form.ignore("name", "description")
    if kind == "json_schema":
        form.flag("strict")  # every answer is held to its schema
        if (schema := form.object("schema")) is None:
            raise form.fail("schema", "is required")
        form.finish()
        return {"response_format": {"type": "json_schema", "schema": schema}}
    form.ignore("schema", "strict")
    form.finish()
    return {"response_format": {"type": "json_object"}} if kind == "json_object" else {}


class ResponseWriter:
    """Writes items, each added, filled by deltas and done; then the whole response once more."""

    media_type = "text/event-stream"

    def __init__(self) -> None:
        self.id, self.created = f"resp_{secrets.token_hex(16)}", now()
        self._sequence, self._item, self._output = 0, {}, []  # type: int, dict[str, Any], list[dict[str, Any]]
        self._usage, self._finish = Usage(), Finish.STOP
        self._called = False  # the call that is being written is complete

    def prepare(self, model: str, call: Call, asked: Mapping[str, Any]) -> None:
        """`asked`: the body, some fields of which a response repeats."""
        self._model, self._request, self._asked = model, call.requests[0], asked

    def _event(self, kind: str, **data: Any) -> bytes:
        self._sequence += 1
        body = {"type": f"response.{kind}", "sequence_number": self._sequence - 1, **data}
        return b"event: response.%b\ndata: %b\n\n" % (kind.encode(), encode_json(body))

    def _response(self, status: str, error: Any = None, details: Any = None) -> dict[str, Any]:
        """`details`: why it is incomplete."""
        params, asked, usage = self._request.params, self._asked, self._usage
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": error,
            "incomplete_details": details,
            "instructions": asked.get("instructions"),
            "metadata": asked.get("metadata") or {},
            "model": self._model,
            "output": list(self._output),
            "parallel_tool_calls": asked.get("parallel_tool_calls") is not False,
            "temperature": params.temperature,
            "tool_choice": asked.get("tool_choice") or "auto",
            "tools": asked.get("tools") or [],
            "top_p": params.top_p,
            "max_output_tokens": params.max_tokens,
            "previous_response_id": None,
            "store": False,
            "text": asked.get("text") or {"format": {"type": "text"}},
            "reasoning": asked.get("reasoning"),
            "truncation": "disabled",
            "usage": {
                "input_tokens": usage.prompt,
                "input_tokens_details": {"cached_tokens": usage.cached},
                "output_tokens": usage.generated,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning},
                "total_tokens": usage.prompt + usage.generated,
            }
            if status in ("completed", "incomplete")
            else None,
        }

    def begin(self, prompt_tokens: int) -> bytes:
        response = self._response("in_progress")
        return self._event("created", response=response) + self._event("in_progress", response=response)

    def chunk(self, index: int, event: Event) -> bytes:
        out, self._usage = b"", self._usage.add(event)
        if event.tool_call is not None:
            out += self._call(event.tool_call)
        elif event.text:
            out += self._text(event)
        if event.finish_reason is not None:
            self._finish = event.finish_reason
            out += self._close()
        return out

    def _open(self, item: dict[str, Any]) -> bytes:
        out = self._close()
        self._item = item
        shown = {**item, "content": []} if "content" in item else item
        out += self._event("output_item.added", output_index=len(self._output), item=shown)
        if item["type"] == "message":
            out += self._event("content_part.added", **self._at(), content_index=0, part=item["content"][0])
        return out

    def _at(self) -> dict[str, Any]:
        return {"item_id": self._item["id"], "output_index": len(self._output)}

    def _text(self, event: Event) -> bytes:
        thinks = event.kind == "reasoning"
        out = b""
        if self._item.get("type") != ("reasoning" if thinks else "message"):
            out = self._open(empty_reasoning() if thinks else empty_message())
        self._item["content"][0]["text"] += event.text
        if thinks:
            return out + self._event("reasoning_text.delta", **self._at(), content_index=0, delta=event.text)
        return out + self._event("output_text.delta", **self._at(), content_index=0, delta=event.text, logprobs=[])

    def _call(self, call: Any) -> bytes:
        out = b""
        if call.name is not None:
            out = self._open(make_call(call.id, call.name, "", "in_progress"))
            self._called = False
        if call.arguments:
            self._item["arguments"] += call.arguments
            out += self._event("function_call_arguments.delta", **self._at(), delta=call.arguments)
        self._called |= call.complete is not None
        return out

    def _close(self) -> bytes:
        item, out = self._item, b""
        if not item:
            return out
        item["status"] = "completed"
        if item["type"] == "message":
            text = item["content"][0]["text"]
            out += self._event("output_text.done", **self._at(), content_index=0, text=text, logprobs=[])
            out += self._event("content_part.done", **self._at(), content_index=0, part=item["content"][0])
        elif item["type"] == "reasoning":
            out += self._event("reasoning_text.done", **self._at(), content_index=0, text=item["content"][0]["text"])
        elif self._called:
            out += self._event(
                "function_call_arguments.done", **self._at(), arguments=item["arguments"], name=item["name"]
            )
        else:  # cut off, or dropped for the text that follows: its arguments are not for a client to run
            item["status"] = "incomplete"
        out += self._event("output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        self._item = {}
        return out

    def end(self) -> bytes:
        status, details = write_status(self._finish)
        return self._event(status, response=self._response(status, details=details))

    def keep_alive(self) -> bytes:
        return KEEP_ALIVE

    def failure(self, problem: Problem) -> bytes:
        error = {"code": problem.code or problem.type, "message": problem.message}
        return self._event("failed", response=self._response("failed", error))

    def write_body(self, completions: list[Completion]) -> dict[str, Any]:
        [done] = completions
        if done.reasoning:
            self._output.append(empty_reasoning() | {"content": [{"type": "reasoning_text", "text": done.reasoning}]})
        if done.text or not done.tool_calls:
            message = empty_message() | {"status": "completed"}
            message["content"][0]["text"] = done.text
            self._output.append(message)
        self._output += [make_call(call.id, call.name, call.arguments, "completed") for call in done.tool_calls]
        self._usage = Usage.of([done])
        status, details = write_status(done.finish_reason)
        return self._response(status, details=details)


def write_status(finish: Finish) -> tuple[str, dict[str, str] | None]:
    """A response's `status` and `incomplete_details`. One that was cancelled has all that its client wanted."""
    if finish in (Finish.STOP, Finish.CANCELLED):
        return "completed", None
    return "incomplete", {"reason": "timeout" if finish is Finish.DEADLINE else "max_output_tokens"}


def empty_message() -> dict[str, Any]:
    content = [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]
    return {
        "type": "message",
        "id": f"msg_{secrets.token_hex(12)}",
        "status": "in_progress",
        "role": "assistant",
        "content": content,
    }


def empty_reasoning() -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": ""}]
    return {"type": "reasoning", "id": f"rs_{secrets.token_hex(12)}", "summary": [], "content": content}


def make_call(id: str, name: str, arguments: str, status: str) -> dict[str, Any]:
    item = {"type": "function_call", "id": f"fc_{secrets.token_hex(12)}", "call_id": id, "name": name}
    return item | {"arguments": arguments, "status": status}
