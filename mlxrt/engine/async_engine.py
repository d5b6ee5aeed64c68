"""The engine for asyncio: one thread steps, coroutines await events.

A reader that lags behind stops its own request and no other: its sequence is paused until the buffer has space again.
"""

import asyncio
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack, overload

import mlx.core as mx

from ..config import EngineConfig
from ..errors import BadRequest, EngineClosed
from .engine import Engine, is_many, read_requests
from .options import EngineOptions, GenerateOptions, Prompt, Prompts, spell_out
from .output import complete, complete_all
from .process_exit import is_exiting, watch
from .request import Completion, EngineEvent, Event, Request
from .session import PromptPlan, ReplyRecorder, Session
from .stats import Stats

T = TypeVar("T")
UNBOUNDED = 1 << 62


class AsyncStream(AsyncIterator[Event]):
    """The events of one call, with a bounded buffer between the engine's thread and the reader."""

    def __init__(
        self,
        engine: Engine,
        loop: asyncio.AbstractEventLoop,
        capacity: Callable[[], int],
        post: Callable[[Callable[[], Any]], "Future[Any]"],
    ):
        self._engine, self._loop, self._capacity, self._post = engine, loop, capacity, post
        self.opening: Future[list[int]] | None = None
        self._ids: list[int] = []
        self._unfinished: set[int] = set()
        self._events: deque[Event] = deque()
        self._unread = 0  # sent by the thread, not yet read; guarded by _count_lock
        self._count_lock = threading.Lock()
        self._paused: set[int] = set()
        self._arrival = asyncio.Event()
        self._closed = False

    # On the engine's thread

    def open(self, requests: list[Request], prompt: tuple[int, ...] | None = None) -> list[int]:
        try:
            for request in requests:
                id = self._engine.submit(request, self._send, prompt)
                self._ids.append(id)
                self._unfinished.add(id)
        except BaseException:  # whatever it was: nobody will read what was submitted
            self._engine.core.drop(self._ids)
            raise
        return list(self._ids)

    def _send(self, event: Event) -> None:
        with self._count_lock:
            self._unread += 1
            full = self._unread >= self._capacity() and event.finish_reason is None
            if full:
                self._paused.add(event.id)
        if full:
            self._engine.core.pause(event.id)
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._receive, event)

    # On the event loop

    def _receive(self, event: Event) -> None:
        self._events.append(event)
        self._arrival.set()

    async def begun(self) -> list[int]:
        """The ids of the requests, in order. Raises what submitting them raised."""
        assert self.opening is not None
        return await asyncio.wrap_future(self.opening)

    async def __anext__(self) -> Event:
        if self._closed:
            raise StopAsyncIteration
        await self.begun()
        while not self._events:
            if not self._unfinished:
                raise StopAsyncIteration
            self._arrival.clear()
            await self._arrival.wait()
        event = self._events.popleft()
        self._count_read()
        if event.finish_reason:
            self._unfinished.discard(event.id)
        if isinstance(event.error, EngineClosed):
            raise event.error
        return event

    def _count_read(self) -> None:
        """One event less in the buffer; paused requests resume when half of it is free."""
        with self._count_lock:
            self._unread -= 1
            waking = list(self._paused) if self._unread <= self._capacity() // 2 else []
            self._paused -= set(waking)
        if waking:
            self._post(lambda: self._resume(waking))

    def _resume(self, ids: list[int]) -> None:
        for id in ids:
            self._engine.core.resume(id)

    async def aclose(self) -> None:
        """Cancel what is left."""
        if self._closed:
            return
        self._closed = True
        await asyncio.to_thread(self._cancel)

    def _cancel(self) -> None:
        opening = self.opening
        if opening is None or opening.cancel():
            return  # the thread never saw it
        if opening.exception() is None and self._unfinished:
            self._engine.core.drop(list(self._unfinished))

    def __del__(self, finalizing=sys.is_finalizing):
        if self._unfinished and not self._closed and not finalizing():
            self._engine.core.drop(list(self._unfinished), wait=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class AsyncReply(AsyncIterator[Event]):
    """An answer as it is generated. The session gets its turn when it is complete."""

    def __init__(self, recorder: ReplyRecorder, stream: AsyncStream):
        self._recorder, self._stream = recorder, stream

    async def __anext__(self) -> Event:
        return self._recorder.record(await anext(self._stream))

    async def completion(self) -> Completion:
        """The full answer."""
        async for _ in self:
            continue
        return complete(self._recorder.events)

    async def text(self) -> str:
        return (await self.completion()).text

    async def aclose(self) -> None:
        await self._stream.aclose()


class AsyncSession:
    """A conversation whose answers are awaited."""

    def __init__(self, session: Session, stream: Callable[[PromptPlan], AsyncStream]):
        self.session, self._stream = session, stream

    @spell_out(GenerateOptions)
    async def say(
        self, x: str | Mapping[str, Any] | Sequence[Mapping[str, Any]], **options: Unpack[GenerateOptions]
    ) -> AsyncReply:
        """Ask; iterate the reply for its events, or await its `text()`."""
        plan = await asyncio.to_thread(self.session.plan_prompt, x, dict(options))
        return AsyncReply(ReplyRecorder(self.session, plan), self._stream(plan))

    def fork(self) -> "AsyncSession":
        return AsyncSession(self.session.fork(), self._stream)

    def rewind(self, turns: int = 1) -> None:
        self.session.rewind(turns)

    async def save(self, path: str | Path, name: str | None = None) -> None:
        await asyncio.to_thread(self.session.save, path, name)


class AsyncEngine:
    """An engine and the thread that steps it. `buffer` events of a stream may wait to be read."""

    def __init__(self, engine: Engine, buffer: int = 64):
        if not isinstance(buffer, int) or isinstance(buffer, bool) or buffer < 1:
            raise BadRequest(f"buffer must be a whole number >= 1, not {buffer!r}")
        self.engine, self.buffer = engine, buffer
        self._jobs: deque[tuple[Callable[[], Any], Future]] = deque()
        self._work = threading.Condition(threading.Lock())
        self._ending = False  # nothing new is accepted; what is there is finished
        self._ended = False
        self.stepping = None  # as its engine says
        watch(self)
        self._thread = threading.Thread(target=self._run, name="mlxrt engine", daemon=True)
        self._thread.start()

    @classmethod
    @spell_out(EngineOptions)
    async def load(
        cls,
        name: str,
        config: EngineConfig = EngineConfig(),  # noqa: B008  frozen
        *,
        on_event: Callable[[EngineEvent], None] | None = None,
        **options: Unpack[EngineOptions],
    ) -> "AsyncEngine":
        """As mlxrt.load, without blocking the event loop."""
        from .load import load

        return cls(await asyncio.to_thread(lambda: load(name, config, on_event=on_event, **options)))

    # For callers

    @overload
    async def generate(self, x: Prompt, **options: Unpack[GenerateOptions]) -> Completion: ...
    @overload
    async def generate(self, x: Prompts, **options: Unpack[GenerateOptions]) -> list[Completion]: ...

    @spell_out(GenerateOptions)
    async def generate(self, x: Prompt | Prompts, **options: Unpack[GenerateOptions]) -> Completion | list[Completion]:
        """A Completion for one input (text, tokens, messages, a Request); a list of them for a list of inputs."""
        async with self.stream(x, **options) as stream:
            order = await stream.begun()
            events: dict[int, list] = {id: [] for id in order}
            async for event in stream:
                events[event.id].append(event)
        done = complete_all(order, events)
        return done if is_many(x) else done[0]

    @spell_out(GenerateOptions)
    def stream(self, x: Prompt | Prompts, **options: Unpack[GenerateOptions]) -> AsyncStream:
        """Events as they come. Leaving the `async with`, or `aclose`, cancels what is left."""
        return self._open_stream(read_requests(x, options))

    def _open_stream(self, requests: list[Request], prompt: tuple[int, ...] | None = None) -> AsyncStream:
        stream = AsyncStream(self.engine, asyncio.get_running_loop(), self._capacity, self._post)
        stream.opening = self._post(lambda: stream.open(requests, prompt))
        return stream

    async def score(self, tokens: Sequence[int], chunk: int | None = None) -> mx.array:
        return await asyncio.to_thread(self.engine.score, tokens, chunk)

    async def stats(self) -> Stats:
        return await asyncio.to_thread(self.engine.stats)

    async def cancel(self, id: int) -> None:
        """End a request; its reader gets a last event."""
        await asyncio.wrap_future(self._post(lambda: self.engine.cancel(id)))

    @spell_out(GenerateOptions)
    def session(
        self, system: str | None = None, on_overflow: str = "error", **options: Unpack[GenerateOptions]
    ) -> AsyncSession:
        """A conversation whose answers are awaited."""

        def stream(plan: PromptPlan) -> AsyncStream:
            return self._open_stream([plan.request], plan.tokens)

        return AsyncSession(Session(self.engine, system, dict(options), on_overflow), stream)

    async def close(self, finish: bool = False) -> None:
        """Stop the thread and close the engine: at once (callers get EngineClosed), or when all requests are done."""
        with self._work:
            self._ending = True
            self._work.notify_all()
        if not finish:
            await asyncio.to_thread(self.engine.close)
            with self._work:
                self._work.notify_all()
        await asyncio.to_thread(self._thread.join)
        await asyncio.to_thread(self.engine.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type | None, *_: object) -> None:
        await self.close(finish=kind is None)

    def _capacity(self) -> int:
        """Events of a stream that may wait; once the engine is ending, any number."""
        return UNBOUNDED if self._ending else self.buffer

    # The thread

    def _post(self, job: Callable[[], T]) -> "Future[T]":
        """Run a job on the engine's thread, between two steps."""
        done: Future[T] = Future()
        with self._work:
            if self._ended or self._ending:
                done.set_exception(self.engine.core.closed_error("the engine is closing and accepts nothing new"))
                return done
            self._jobs.append((job, done))
            self._work.notify_all()
        return done

    def _run(self) -> None:
        core = self.engine.core
        try:
            while self._wait():
                self._run_jobs()
                if self._ending:
                    core.resume_all()
                if core.busy and not core.step():
                    with self._work:
                        if not self._jobs:  # all that is left waits for its readers, or for its deadline
                            self._work.wait(0.1)
        except Exception:  # every caller has got the error already, from the step that failed or from `close`
            return
        finally:
            self._end()

    def wake(self) -> None:
        """Let the thread look again whether there is something to do."""
        with self._work:
            self._work.notify_all()

    def _wait(self) -> bool:
        """Sleep until there is something to do; False when nothing ever will be."""
        with self._work:
            while not self._jobs and not self.engine.core.busy and not self._ending and not is_exiting():
                self._work.wait()
            return (bool(self._jobs) or self.engine.core.busy) and not is_exiting()

    def _run_jobs(self) -> None:
        while self._jobs:
            job, done = self._jobs.popleft()
            if not done.set_running_or_notify_cancel():
                continue
            try:
                done.set_result(job())
            except Exception as error:  # raised where the caller awaits it
                done.set_exception(error)

    def _end(self) -> None:
        """However the thread ends, nothing waits for it any more."""
        with self._work:
            self._ended = True
            left, self._jobs = self._jobs, deque()
        self.engine.close()
        for _, done in left:
            if done.set_running_or_notify_cancel():
                done.set_exception(self.engine.core.closed_error("the engine was closed before the request began"))
