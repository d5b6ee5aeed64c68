"""Ollama's protocol: /api/chat, /api/generate, /api/tags, /api/show, /api/ps, /api/version, /api/pull.

Newline-delimited JSON; answers stream unless `"stream": false`. Every line is parsed by clients, so a keep-alive is a
line with empty content.
"""

import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ..engine.async_engine import AsyncEngine
from ..engine.request import Completion, Event, Finish, Logprobs, Request, Timings
from ..text import Tokenizer
from .answering import Call, answer, open_call, read_body, reply
from .openai_chat import FINISH, check_message, write_logprobs
from .options import choose_effort, make_params, read_stop
from .problem import Fields, Problem, encode_json
from .served_models import ServedModel

VERSION = "0.13.0"  # what clients compare with: some refuse older ones
NO_EFFECT = (
    "num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "use_mmap", "use_mlock", "low_vram",
    "numa", "vocab_only", "f16_kv", "repeat_last_n", "tfs_z", "typical_p", "mirostat", "mirostat_tau", "mirostat_eta",
    "penalize_newline",
)  # fmt: skip
ANSWER_FIELDS = (
    "options", "stream", "format", "think", "tools", "system", "template", "raw", "images", "suffix", "context",
    "truncate", "shift", "logprobs", "top_logprobs",
)  # fmt: skip
THINKING_EFFORTS = ("low", "medium", "high", "max")


async def version(http: HttpRequest) -> Response:
    return reply({"version": VERSION})


async def tags(http: HttpRequest) -> Response:
    models = http.app.state.models
    return reply({"models": [write_tag(model, models.created) for model in models.models.values()]})


async def running(http: HttpRequest) -> Response:
    loaded = [m for m in http.app.state.models.models.values() if m.engine is not None]
    return reply({"models": [write_tag(m, int(m.loaded_at)) | write_memory(m) for m in loaded]})


async def show(http: HttpRequest) -> Response:
    body = await read_body(http)
    name = body.text("model") or body.text("name")
    async with http.app.state.models.use(name) as (model, engine):
        inner = engine.engine
        kind = inner.model.config.model_type
        capabilities = ["completion"]
        if inner.tokenizer.has_template:
            capabilities += ["tools"]
        if inner.answer_format.found.reasoning != "none":
            capabilities += ["thinking"]
        information = {
            "general.architecture": kind,
            f"{kind}.context_length": inner.context,
            "tokenizer.ggml.model": "mlxrt",
        }
        details = write_tag(model, http.app.state.models.created)["details"]
        return reply(
            {
                "modelfile": "",
                "parameters": "",
                "template": "",
                "details": details,
                "model_info": information,
                "capabilities": capabilities,
            }
        )


async def pull(http: HttpRequest) -> Response:
    """Served models are there already; nothing is downloaded for a client."""
    body = await read_body(http)
    name = body.text("model") or body.text("name")
    try:
        http.app.state.models.find(name)
    except Problem:
        text = f"this server downloads nothing for a client; start it with --model {str(name)[:80]}"
        raise Problem(501, text, "not_implemented") from None
    return reply({"status": "success"})


async def not_implemented(http: HttpRequest) -> Response:
    raise Problem(501, f"{http.url.path} is not implemented by mlxrt", "not_implemented")


def write_tag(model: ServedModel, at: int) -> dict[str, Any]:
    modified = write_time(datetime.fromtimestamp(at, UTC))
    family = model.engine.engine.model.config.model_type if model.engine is not None else "unknown"
    details = {
        "parent_model": "",
        "format": "mlx",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": "",
    }
    head = {"name": model.name, "model": model.name, "modified_at": modified}
    return head | {"size": 0, "digest": "", "details": details}


def write_memory(model: ServedModel) -> dict[str, Any]:
    assert model.engine is not None
    weights = model.engine.engine.core.memory.weights
    return {
        "size": weights,
        "size_vram": weights,
        "expires_at": "2318-01-01T00:00:00Z",
        "context_length": model.engine.engine.context,
    }


async def chat(http: HttpRequest) -> Response:
    return await respond(http, is_chat=True)


async def generate(http: HttpRequest) -> Response:
    return await respond(http, is_chat=False)


async def respond(http: HttpRequest, is_chat: bool) -> Response:
    body = await read_body(http)
    models, name = http.app.state.models, body.text("model")
    if name is None:
        raise body.fail("model", "is required")
    asked = body.items("messages") if is_chat else body.text("prompt")
    if not asked:
        return await load_or_unload(http, body, models.find(name), is_chat)
    writer = LineWriter(name, is_chat)

    def make(engine: AsyncEngine) -> Call:
        call = read_chat(body, engine) if is_chat else read_generate(body, engine)
        writer.prepare(engine.engine.tokenizer, body.integer("top_logprobs") or 0)
        return call

    return await answer(http, await open_call(http, name, make), writer)


async def load_or_unload(http: HttpRequest, body: Fields, model: ServedModel, is_chat: bool) -> Response:
    """A request without a prompt loads its model; with `keep_alive: 0` it unloads it."""
    reason, keep_alive = "load", body.raw("keep_alive")
    for key in ANSWER_FIELDS:  # of an answer that nobody asked for
        body.raw(key)
    body.finish()
    if keep_alive in (0, "0", "0s"):
        reason = "unload"
        await http.app.state.models.release(model)
    else:
        async with http.app.state.models.use(model.name):
            pass
    content = {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
    return reply({"model": model.name, "created_at": write_time(), **content, "done": True, "done_reason": reason})


def read_chat(body: Fields, engine: AsyncEngine) -> Call:
    messages = [read_message(body, i, m) for i, m in enumerate(body.items("messages") or ())]
    tools = body.items("tools", 1024)
    options = {"tools": tuple(tools)} if tools else {}
    return finish_call(body, engine, {"messages": tuple(messages), **options})


def read_message(body: Fields, i: int, message: Any) -> dict[str, Any]:
    check_message(body, i, message)
    found = dict(message)
    if found.pop("images", None):
        raise body.fail(f"messages[{i}].images", "only text is answered")
    if "thinking" in found:
        found["reasoning_content"] = found.pop("thinking")
    if "tool_name" in found:
        found["name"] = found.pop("tool_name")
    return {key: value for key, value in found.items() if value is not None}


def read_generate(body: Fields, engine: AsyncEngine) -> Call:
    prompt, system = body.text("prompt") or "", body.text("system")
    if body.text("suffix"):
        raise body.fail("suffix", "is not supported")
    if body.items("images"):
        raise body.fail("images", "only text is answered")
    if body.text("template"):
        raise body.fail("template", "is not supported: the model's own template is used")
    if body.flag("raw"):
        for key in ("system", "context", "think"):
            if body.raw(key):
                raise body.fail(key, "goes through the model's template, and raw asks for none")
        return finish_call(body, engine, {"prompt": prompt})
    body.ignore("context")
    first = [{"role": "system", "content": system}] if system else []
    return finish_call(body, engine, {"messages": (*first, {"role": "user", "content": prompt})})


def finish_call(body: Fields, engine: AsyncEngine, asked: dict[str, Any]) -> Call:
    options = body.inner("options") or Fields({}, "options", body.ignored)
    params = read_options(options, engine, body)
    found = read_format(body) | (read_think(body, engine) if "messages" in asked else {})
    body.ignore("keep_alive", "truncate", "shift")
    stream = body.flag("stream", True)
    body.finish()
    return Call([Request(**asked, params=params, **found)], stream, body.ignored)


def read_options(options: Fields, engine: AsyncEngine, body: Fields) -> Any:
    limit = options.integer("num_predict", -2)
    penalty = options.number("repeat_penalty", 1e-6, 1e6)
    wants, top = body.flag("logprobs"), body.integer("top_logprobs", 0, 20) or 0
    if top and not wants:
        raise body.fail("top_logprobs", "needs logprobs: true")
    seed = options.integer("seed", -(2**63), 2**64 - 1)
    found = {
        "temperature": options.number("temperature", 0, 1e6),
        "top_k": options.integer("top_k", 0, 1 << 30),
        "top_p": options.number("top_p", 0, 1),
        "min_p": options.number("min_p", 0, 1),
        "repetition_penalty": penalty,
        "presence_penalty": options.number("presence_penalty", -100, 100),
        "frequency_penalty": options.number("frequency_penalty", -100, 100),
        "seed": None if seed is None else seed % 2**64,
        "stop": read_stop(options, "stop"),
        "logprobs": max(top, 1) if wants else 0,
    }
    options.ignore(*NO_EFFECT)
    options.finish()
    return make_params(engine, found, limit if limit is not None and limit > 0 else None)


def read_think(body: Fields, engine: AsyncEngine) -> dict[str, Any]:
    value = body.raw("think")
    if value is None:
        return {}
    if isinstance(value, bool):
        return {"thinking": "on" if value else "off"}
    if value in THINKING_EFFORTS:
        return {"thinking": "on", "template_options": choose_effort(body, "think", value, engine)}
    raise body.fail("think", f"expected true, false or one of {', '.join(THINKING_EFFORTS)}")


def read_format(body: Fields) -> dict[str, Any]:
    value = body.raw("format")
    if value is None or value == "":
        return {}
    if value == "json":
        return {"response_format": {"type": "json_object"}}
    if isinstance(value, dict):
        return {"response_format": {"type": "json_schema", "schema": value}}
    raise body.fail("format", 'expected "json" or a JSON schema')


def write_time(at: datetime | None = None) -> str:
    """A time as Ollama's clients read it; now, where none is given."""
    return (at or datetime.now(UTC)).isoformat().replace("+00:00", "Z")


class LineWriter:
    media_type = "application/x-ndjson"

    def __init__(self, model: str, is_chat: bool):
        self._model, self._is_chat, self._began = model, is_chat, time.perf_counter()
        self._calls: dict[int, list[str]] = {}  # index of a call -> name and the text of its arguments so far

    def prepare(self, tokenizer: Tokenizer, top: int) -> None:
        """`top`: how many of the likeliest tokens are told with each chosen one, where these are asked for at all."""
        self._tokenizer, self._top = tokenizer, top

    def _line(self, content: dict[str, Any], done: dict[str, Any] | None = None) -> bytes:
        body = {"model": self._model, "created_at": write_time(), **self._content(content), "done": done is not None}
        return encode_json(body | (done or {})) + b"\n"

    def _content(self, content: dict[str, Any]) -> dict[str, Any]:
        logprobs = {"logprobs": content.pop("logprobs")} if "logprobs" in content else {}
        if self._is_chat:
            return {"message": {"role": "assistant", "content": "", **content}, **logprobs}
        return {"response": content.pop("content", ""), **content, **logprobs}

    def begin(self, prompt_tokens: int) -> bytes:
        return b""

    def chunk(self, index: int, event: Event) -> bytes:
        out = b""
        if event.tool_call is not None:  # whole calls only
            if (call := event.tool_call.complete) is not None:
                self._calls[call.index] = [call.name, call.arguments]
        elif event.text or event.logprobs:
            content: dict[str, Any] = {"thinking" if event.kind == "reasoning" else "content": event.text}
            out = self._line(content | self._logprobs([event.logprobs] if event.logprobs else []))
        if event.finish_reason is not None:
            if self._calls:
                out += self._line({"tool_calls": [write_call(i, *call) for i, call in self._calls.items()]})
            assert event.timings is not None
            out += self._line({}, self._done(event.finish_reason, event.timings))
        return out

    def _logprobs(self, steps: Sequence[Logprobs]) -> dict[str, Any]:
        if not steps:
            return {}
        return {"logprobs": [write_logprobs(self._tokenizer, step, self._top) for step in steps]}

    def _done(self, finish: Finish, timings: Timings) -> dict[str, Any]:
        first, total = int(timings.first_token_s * 1e9), int(timings.total_s * 1e9)
        return {
            "done_reason": FINISH[finish],
            "total_duration": max(int((time.perf_counter() - self._began) * 1e9), total),
            "load_duration": 0,
            "prompt_eval_count": timings.prompt_tokens,
            "prompt_eval_duration": first,
            "eval_count": timings.generated_tokens,
            "eval_duration": total - first,
        }

    def end(self) -> bytes:
        return b""

    def keep_alive(self) -> bytes:
        return self._line({"content": ""})

    def failure(self, problem: Problem) -> bytes:
        return encode_json({"error": problem.message}) + b"\n"

    def write_body(self, completions: list[Completion]) -> dict[str, Any]:
        [done] = completions
        content: dict[str, Any] = {"content": done.text, **self._logprobs(done.logprobs)}
        if done.reasoning:
            content["thinking"] = done.reasoning
        if done.tool_calls:
            content["tool_calls"] = [write_call(i, call.name, call.arguments) for i, call in enumerate(done.tool_calls)]
        head = {"model": self._model, "created_at": write_time(), **self._content(content), "done": True}
        return head | self._done(done.finish_reason, done.timings)


def write_call(index: int, name: str, arguments: str) -> dict[str, Any]:
    """Ollama's arguments are an object; text that is no JSON object is handed over as it is."""
    try:
        parsed = json.loads(arguments or "{}")
    except ValueError:
        parsed = None
    function = {
        "index": index,
        "name": name,
        "arguments": parsed if isinstance(parsed, dict) else {"arguments": arguments},
    }
    return {"id": f"call_{index}", "function": function}
