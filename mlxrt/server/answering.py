"""From a protocol's request to the engine and back: what all protocols share.

A protocol makes a `Call` of a body and a `Writer` for its answer. `answer` runs the call, cancels it when the client
leaves, and hands the writer one event after the other. The status is sent when the requests are queued: what is wrong
with them is known by then, and no client waits for a prefill in silence.
"""

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..engine.async_engine import AsyncEngine
from ..engine.async_stream import AsyncStream
from ..engine.output import complete
from ..engine.request import Completion, Event, Request
from ..errors import BadRequest, QueueFull
from .problem import CLIENT_LEFT, Fields, Problem, describe, describe_full_queue, encode_json

log = logging.getLogger("mlxrt.server")

# Templates and tokenisation take up to a second: not on the event loop, and not on the engine's thread, where
# everybody's next token would wait for them.
PREPARERS = ThreadPoolExecutor(2, "mlxrt prepare")
# A grammar takes up to ten seconds. More threads than compile at a time: who asks for a form that is compiled already
# waits for none of them.
COMPILERS = ThreadPoolExecutor(8, "mlxrt compile")

KEEP_ALIVE_S = 5.0  # by the clock: proxies and clients give up on a silent stream
MAX_DEPTH = 200  # of a body's JSON
TIMEOUT_HEADER = "x-request-timeout"  # seconds; the body's `timeout` goes first


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
    def write_body(self, completions: list[Completion]) -> dict[str, Any]: ...


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


def reply(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """An answer in JSON, whatever its protocol."""
    return Response(encode_json(value), status, headers, "application/json")


@dataclass(frozen=True, eq=False)  # two that look alike are two calls
class RunningCall:
    """What an HTTP request asked of an engine. `salt`: of its key, where keys are isolated."""

    engine: AsyncEngine
    ids: list[int]
    salt: str


class RunningCalls:
    """The calls that may be cancelled, by the id of their HTTP request; clients choose ids, so several may have one."""

    def __init__(self) -> None:
        self._calls: dict[str, list[RunningCall]] = {}

    def add(self, request_id: str, call: RunningCall) -> None:
        self._calls.setdefault(request_id, []).append(call)

    def remove(self, request_id: str, call: RunningCall) -> None:
        self._calls[request_id].remove(call)
        if not self._calls[request_id]:
            del self._calls[request_id]

    def find(self, request_id: str, salt: str) -> list[RunningCall]:
        return [call for call in self._calls.get(request_id, ()) if call.salt == salt]


async def answer(http: HttpRequest, opened: "OpenCall", writer: Writer) -> Response:
    """Answer with a stream or at once; then close the engine's stream and release the model."""
    call, stream, metrics = opened.call, opened.stream, http.app.state.metrics
    headers = {"x-mlxrt-ignored": write_header(", ".join(call.ignored)[:1000])} if call.ignored else {}
    async with opened.leave as leave:
        ids = await begin(http, stream)
        running, request_id = http.app.state.running, http.state.request_id
        entry = RunningCall(opened.engine, ids, http.state.cache_salt)
        running.add(request_id, entry)
        leave.callback(running.remove, request_id, entry)
        if call.stream:
            response = FrameResponse(http, opened, ids, writer, leave.pop_all())
            response.headers.update(headers)
            return response
        completions = await unless_disconnected(http, collect(stream, ids, metrics.record))
        return reply(writer.write_body(completions), headers=headers)


async def begin(http: HttpRequest, stream: AsyncStream) -> list[int]:
    """The ids of the requests, once they are queued."""
    with report_full_queue(http):
        return await stream.wait_submitted()


@contextmanager
def report_full_queue(http: HttpRequest) -> Iterator[None]:
    """A queue that is full as a 429, which says when there is likely to be room."""
    try:
        yield
    except QueueFull as error:
        raise describe_full_queue(error, http.app.state.metrics.seconds_per_request()) from None


class FrameResponse(Response):
    """A streamed answer. A failure after the first byte is a frame; no stream ends without a last one.

    Starlette's own streaming response would leave a stream open whose client goes while it is being written to.
    """

    def __init__(self, http: HttpRequest, opened: "OpenCall", ids: list[int], writer: Writer, leave: AsyncExitStack):
        super().__init__(None, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self.media_type = writer.media_type
        self._http, self._stream, self._ids, self._writer, self._leave = http, opened.stream, ids, writer, leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._leave:
            try:
                await unless_disconnected(self._http, self._send_all(send))
            except TimeoutError:
                log.warning(f"{self._http.state.request_id}: the client reads nothing and is dropped")
            except Problem as problem:
                if problem.status != CLIENT_LEFT:
                    raise

    async def _send_all(self, send: Send) -> None:
        headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
        headers.append((b"content-type", f"{self.media_type}; charset=utf-8".encode()))
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        async def put(body: bytes, more: bool = True) -> None:
            if body or not more:
                await send({"type": "http.response.body", "body": body, "more_body": more})

        try:
            await self._send_frames(put)
            last = self._writer.end()
        except TimeoutError:
            raise
        except Exception as error:  # a request boundary: the status is out, so the stream itself must tell
            last = self._writer.failure(describe(error))
        await put(last, more=False)

    async def _send_frames(self, put: Callable[[bytes], Awaitable[None]]) -> None:
        order, unfinished = {id: i for i, id in enumerate(self._ids)}, len(self._ids)
        writer, record = self._writer, self._http.app.state.metrics.record
        await put(writer.begin(self._stream.prompt_tokens))
        while unfinished:
            events = await self._stream.read(KEEP_ALIVE_S)
            frames = b"".join([write_event(writer, order[event.id], event) for event in events])
            for event in events:
                if event.finish_reason is not None:
                    unfinished -= 1
                    record(event)
            await put(frames if events else writer.keep_alive())


def write_header(text: str) -> str:
    """A client's words in a header, which takes printable ASCII and no line's end."""
    return "".join(c if c.isascii() and c.isprintable() else "?" for c in text)


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
            raise Problem(CLIENT_LEFT, "the client has left")
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


async def open_call(http: HttpRequest, name: str | None, make: Callable[[AsyncEngine], Call]) -> OpenCall:
    """Find the model, make its requests with `make`, render their prompts, and queue them."""
    async with AsyncExitStack() as leave:
        _, engine = await leave.enter_async_context(http.app.state.models.use(name))
        call = make(engine)
        if len(call.requests) > (room := http.app.state.models.config.max_queue):  # there will never be room for it
            text = f"{len(call.requests)} answers in one call; this server's queue holds {room} (serve --max-queue)"
            raise Problem(400, text)
        call = replace(call, requests=[restrict(http, request) for request in call.requests])
        if http.app.state.log_prompts:
            log_prompt(http.state.request_id, call)
        prompts = await prepare(http, engine, call.requests)
        stream = engine.stream_encoded(call.requests, prompts)
        leave.push_async_callback(stream.aclose)
        return OpenCall(call, engine, stream, leave.pop_all())


def restrict(http: HttpRequest, request: Request) -> Request:
    """A request within what its HTTP request allows: the prefixes of its key only, the time its header gives."""
    salt, limit = http.state.cache_salt, http.headers.get(TIMEOUT_HEADER)
    if salt:
        request = replace(request, cache_salt=f"{salt}\n{request.cache_salt}")
    if limit is None or request.deadline_s is not None:
        return request
    try:
        return replace(request, deadline_s=float(limit))
    except (ValueError, BadRequest):
        text = f"{TIMEOUT_HEADER}: expected seconds > 0, not {limit[:40]!r}"
        raise Problem(400, text, param=TIMEOUT_HEADER) from None


class PreparationQueue:
    """Counts the calls that are being prepared: no more at a time than `size`, so that no burst is kept waiting out of
    sight of the engine's own queue."""

    def __init__(self, size: int):
        self._size, self._calls = size, 0

    @contextmanager
    def enter(self) -> Iterator[None]:
        """QueueFull where there is no room."""
        if self._calls >= self._size:
            text = f"{self._calls} calls are being prepared; the queue holds {self._size}"
            raise QueueFull(f"{text}: try again later, or raise max_queue")
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1


async def prepare(
    http: HttpRequest, engine: AsyncEngine, requests: list[Request], compiles: bool = True
) -> list[tuple[int, ...]]:
    """The requests' prompts as tokens; their grammar is compiled before, unless nothing will be generated. A client
    that leaves meanwhile gives up its place."""

    async def work() -> list[tuple[int, ...]]:
        loop, first = asyncio.get_running_loop(), requests[0]
        if compiles and (first.response_format is not None or first.tools):
            await loop.run_in_executor(COMPILERS, engine.engine.compile_grammar, first)
        return await loop.run_in_executor(PREPARERS, encode_prompts, engine, requests)

    with report_full_queue(http), http.app.state.preparing.enter():
        return await unless_disconnected(http, work())


def encode_prompts(engine: AsyncEngine, requests: list[Request]) -> list[tuple[int, ...]]:
    """Copies of a request are encoded once."""
    found: list[tuple[int, ...]] = []
    for i, request in enumerate(requests):
        same = i > 0 and is_same_prompt(request, requests[i - 1])
        found.append(found[-1] if same else engine.engine.encode(request))
    return found


def is_same_prompt(a: Request, b: Request) -> bool:
    return a.messages is b.messages and a.prompt is b.prompt and a.tokens is b.tokens


def log_prompt(request_id: str, call: Call) -> None:
    for request in call.requests:
        asked = request.messages if request.messages is not None else request.prompt or request.tokens
        log.info(f"{request_id}: asked {json.dumps(asked, ensure_ascii=False, default=str)}")


def now() -> int:
    return int(time.time())
