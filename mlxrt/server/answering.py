"""From a protocol's request to the engine and back: what all protocols share.

A protocol makes a `Call` of a body and a `Writer` for its answer. `answer` runs the call, cancels it when the client
leaves, and hands the writer one event after the other. The status is sent when the requests are queued: what is wrong
with them is known by then, and no client waits for a prefill in silence.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse

from ..engine.async_engine import AsyncEngine
from ..engine.async_stream import AsyncStream
from ..engine.output import complete
from ..engine.request import Completion, Event, Request
from .problem import Fields, Problem, describe, encode_json
from .served_models import ServedModels

KEEP_ALIVE_S = 5.0  # by the clock: proxies and clients give up on a silent stream
MAX_DEPTH = 200  # of a body's JSON


@dataclass(frozen=True)
class Call:
    """One call of a client: requests for the engine (several for n > 1 or a list of prompts), and how to answer."""

    requests: list[Request]
    stream: bool
    ignored: list[str] = field(default_factory=list)  # fields that were accepted and change nothing


class Writer(Protocol):
    """A protocol's answer: the bytes of a stream, or the body of a plain answer."""

    media_type: str

    def begin(self, prompt_tokens: int) -> bytes: ...
    def chunk(self, index: int, event: Event) -> bytes: ...
    def end(self) -> bytes: ...
    def keep_alive(self) -> bytes: ...
    def failure(self, problem: Problem) -> bytes: ...
    def whole(self, completions: list[Completion]) -> dict[str, Any]: ...


async def read_body(http: HttpRequest) -> Fields:
    """A body's JSON object, whatever its content type says: `curl -d` sends none."""
    raw = await http.body()
    try:
        body = json.loads(raw.decode("utf-8")) if raw else {}
    except (ValueError, RecursionError) as error:
        raise Problem(400, f"the body is not JSON: {str(error)[:200]}") from None
    if not isinstance(body, dict):
        raise Problem(400, "the body must be a JSON object")
    check_depth(body)
    return Fields(body)


def check_depth(body: Any) -> None:
    level, depth = [body], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise Problem(400, f"the body is nested deeper than {MAX_DEPTH}")
        inner = (v for x in level for v in (x.values() if isinstance(x, dict) else x))
        level = [v for v in inner if isinstance(v, (dict, list))]


async def answer(http: HttpRequest, opened: "OpenCall", writer: Writer) -> Response:
    """Answer with a stream or at once; then close the engine's stream and release the model."""
    call, stream = opened.call, opened.stream
    headers = {"x-mlxrt-ignored": ", ".join(call.ignored)[:1000]} if call.ignored else {}
    async with opened.leave as leave:
        ids = await stream.begun()
        running, request_id = http.app.state.running, http.state.request_id
        running[request_id] = (opened.engine, ids)
        leave.callback(running.pop, request_id, None)
        record = http.app.state.metrics.record
        if call.stream:
            frames = stream_frames(stream, ids, writer, record, leave.pop_all())
            headers |= {"cache-control": "no-cache", "x-accel-buffering": "no"}
            return StreamingResponse(frames, media_type=writer.media_type, headers=headers)
        completions = await unless_disconnected(http, collect(stream, ids, record))
        body = encode_json(writer.whole(completions))
        return Response(body, media_type="application/json", headers=headers)


async def stream_frames(
    stream: AsyncStream, ids: list[int], writer: Writer, record: Callable[[Event], None], leave: AsyncExitStack
) -> AsyncIterator[bytes]:
    """The bytes of a streamed answer. A failure after the first byte is a frame; no stream ends without a last one."""
    order, unfinished = {id: i for i, id in enumerate(ids)}, len(ids)
    async with leave:
        try:
            yield writer.begin(stream.prompt_tokens)
            while unfinished:
                events = await stream.read(KEEP_ALIVE_S)
                frames = b"".join([write_event(writer, order[event.id], event) for event in events])
                for event in events:
                    if event.finish_reason is not None:
                        unfinished -= 1
                        record(event)
                yield frames or (b"" if events else writer.keep_alive())
            yield writer.end()
        except Exception as error:  # a request boundary: the status is out, so the stream itself must tell
            yield writer.failure(describe(error))


def write_event(writer: Writer, index: int, event: Event) -> bytes:
    if event.error is not None:
        raise event.error
    return writer.chunk(index, event)


async def collect(stream: AsyncStream, ids: list[int], record: Callable[[Event], None]) -> list[Completion]:
    events: dict[int, list[Event]] = {id: [] for id in ids}
    async for event in stream:
        record(event)
        if event.error is not None:
            raise event.error
        events[event.id].append(event)
    return [complete(events[id]) for id in ids]


async def unless_disconnected(http: HttpRequest, work: Any) -> Any:
    """The result of `work`, which is cancelled as soon as the client has left: Starlette would let it run."""
    doing = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(until_disconnected(http))
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise Problem(499, "the client has left")
        return doing.result()
    finally:
        doing.cancel()
        leaving.cancel()
        await asyncio.gather(doing, leaving, return_exceptions=True)


async def until_disconnected(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        continue


@dataclass(frozen=True)
class OpenCall:
    """A call whose requests are being queued. `leave` closes its stream and releases its model."""

    call: Call
    engine: AsyncEngine
    stream: AsyncStream
    leave: AsyncExitStack


async def open_call(models: ServedModels, name: str | None, make: Callable[[AsyncEngine], Call]) -> OpenCall:
    """Find the model, make its requests with `make`, and queue them."""
    async with AsyncExitStack() as leave:
        _, engine = await leave.enter_async_context(models.use(name))
        call = make(engine)
        if any(request.response_format is not None or request.tools for request in call.requests):
            # Not on the engine's thread, where all other requests would wait for it.
            await asyncio.to_thread(engine.engine.compile_grammar, call.requests[0])
        stream = engine.stream(call.requests)
        leave.push_async_callback(stream.aclose)
        return OpenCall(call, engine, stream, leave.pop_all())


def now() -> int:
    return int(time.time())
