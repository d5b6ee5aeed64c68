"""The events of a call for asyncio: from the engine's thread through a bounded buffer to the coroutine that reads them.

The engine holds the buffer and never the stream, so a stream that nobody holds any more is deleted, whether or not the
garbage collector runs, and its requests end.
"""

import asyncio
import sys
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any, Self

from ..errors import BadRequest, EngineClosed
from .async_timeout import RepeatedTimeout
from .engine import Engine
from .request import Completion, Event, Request
from .session import ReplyRecorder

OPENED_NOTHING: "Future[list[int]]" = Future()
OPENED_NOTHING.set_result([])


class LoopReaders:
    """The buffers that are read on one event loop. However many events a step sends, the loop is woken once."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self.buffers: weakref.WeakSet[EventBuffer] = weakref.WeakSet()
        self._due: set[EventBuffer] = set()  # have events since the loop was last woken; guarded by _lock
        self._lock = threading.Lock()

    def wake(self, buffer: "EventBuffer") -> None:
        """On the engine's thread. RuntimeError where the loop is closed."""
        with self._lock:
            woken = bool(self._due)
            self._due.add(buffer)
        if not woken:
            self.loop.call_soon_threadsafe(self._notify)

    def _notify(self) -> None:
        """On the event loop."""
        with self._lock:
            due, self._due = self._due, set()
        for buffer in due:
            buffer.arrival.set()


class EventBuffer:
    """Events that wait for one reader. A reader that lags behind pauses its own requests and no other.

    `capacity`: how many may wait. `post` runs a job on the engine's thread.
    """

    def __init__(
        self,
        engine: Engine,
        loop: asyncio.AbstractEventLoop,
        capacity: Callable[[], int],
        post: Callable[[Callable[[], Any]], "Future[Any]"],
    ):
        self._engine, self.loop, self._capacity, self._post = engine, loop, capacity, post
        self.ids: list[int] = []
        self.prompt_tokens = 0  # of all requests
        self.events: deque[Event] = deque()  # appended on the engine's thread
        self.arrival = asyncio.Event()
        self.abandoned = False  # nobody will read any more
        self._unread = 0  # sent and not yet read; guarded by _lock
        self._paused: set[int] = set()
        self._lock = threading.Lock()

    # On the engine's thread

    def open(self, readers: LoopReaders, requests: list[Request], prompts: Sequence[tuple[int, ...]]) -> list[int]:
        def listen(event: Event) -> None:
            self.send(event, readers)

        readers.buffers.add(self)
        try:
            for i, request in enumerate(requests):
                if self.abandoned:
                    break
                self.ids.append(self._engine.submit(request, listen, prompts[i]))
                if (state := self._engine.core.outputs.states.get(self.ids[-1])) is not None:
                    self.prompt_tokens += len(state.seq.prompt)
        except BaseException:  # whatever it was: nobody will read what was submitted
            self.abandon()
            raise
        if self.abandoned:  # meanwhile, perhaps before the last id was known
            self.abandon()
        return list(self.ids)

    def send(self, event: Event, readers: LoopReaders) -> None:
        if self.abandoned:
            return
        with self._lock:
            self._unread += 1
            full = self._unread >= self._capacity() and event.finish_reason is None
            if full:
                self._paused.add(event.id)
        if full:
            self._engine.core.pause(event.id)
        self.events.append(event)
        try:
            readers.wake(self)
        except RuntimeError:  # the loop is closed
            self.abandon()

    # On any thread

    def abandon(self) -> None:
        """End the requests. Takes no lock and never blocks, so a finaliser may call it."""
        self.abandoned = True
        self._engine.core.drop(list(self.ids), wait=False)

    def cancel(self, id: int) -> "Future[Any]":
        return self._post(lambda: self._engine.cancel(id))

    # On the event loop

    def check_loop(self) -> None:
        if asyncio.get_running_loop() is not self.loop:
            raise BadRequest("a stream is read on the event loop it was made on; this is another one")

    def pop(self) -> Event:
        """Take the next event; paused requests resume when half of the buffer is free."""
        event = self.events.popleft()
        with self._lock:
            self._unread -= 1
            waking = list(self._paused) if self._unread <= self._capacity() // 2 else []
            self._paused -= set(waking)
        if waking:
            self._post(lambda: self._resume(waking))
        return event

    def _resume(self, ids: list[int]) -> None:
        for id in ids:
            self._engine.core.resume(id)


class AsyncStream(AsyncIterator[Event]):
    """The events of one call. Its requests end when it is closed or nobody holds it any more.

    `owner` is kept alive as long as the stream is."""

    def __init__(self, engine: Engine, buffer: EventBuffer, opening: "Future[list[int]]", owner: object):
        self._engine, self.buffer, self._opening, self._owner = engine, buffer, opening, owner
        self._ids: list[int] | None = None  # once they are known
        self._last_events = 0  # read so far: one for every request that has ended
        self._closed = False
        self._timeout = RepeatedTimeout()

    async def wait_submitted(self) -> list[int]:
        """The ids of the requests, in order. Raises what submitting them raised, and the stream is at its end."""
        if self._ids is not None:
            return self._ids
        try:
            if not self._opening.done():
                await asyncio.shield(asyncio.wrap_future(self._opening))  # a cancelled reader cancels its wait only
            self._ids = self._opening.result()
            return self._ids
        except Exception:
            self._opening, self._closed = OPENED_NOTHING, True  # a stream that held the error would hold itself
            raise

    async def __anext__(self) -> Event:
        ids, buffer = () if self._closed else await self.wait_submitted(), self.buffer
        buffer.check_loop()
        while not buffer.events or self._closed:
            if self._closed or self._last_events == len(ids):
                raise StopAsyncIteration
            buffer.arrival.clear()
            await buffer.arrival.wait()
        event = buffer.pop()
        if event.finish_reason:
            self._last_events += 1
        if isinstance(event.error, EngineClosed):
            raise event.error
        return event

    @property
    def prompt_tokens(self) -> int:
        """Of all requests; known once `wait_submitted` has returned."""
        return self.buffer.prompt_tokens

    async def read(self, timeout: float | None = None) -> list[Event]:
        """All events that have arrived; waits for the first, and gives none when `timeout` seconds have passed."""
        ids, buffer = () if self._closed else await self.wait_submitted(), self.buffer
        buffer.check_loop()
        if not buffer.events and not self._closed and self._last_events < len(ids):
            buffer.arrival.clear()
            try:
                with self._timeout.within(timeout) if timeout is not None else nullcontext():
                    await buffer.arrival.wait()
            except TimeoutError:
                return []
        found: list[Event] = []
        while buffer.events and not self._closed:
            event = buffer.pop()
            self._last_events += event.finish_reason is not None
            if isinstance(event.error, EngineClosed):
                raise event.error
            found.append(event)
        return found

    async def cancel(self) -> None:
        """End the requests; the last event of each follows."""
        for id in await self.wait_submitted():
            await asyncio.wrap_future(self.buffer.cancel(id))

    async def read_all(self) -> dict[int, list[Event]]:
        """Wait for the end; the events by request."""
        events: dict[int, list[Event]] = {}
        async for event in self:
            events.setdefault(event.id, []).append(event)
        return events

    @property
    def _exhausted(self) -> bool:
        return self._opening.done() and self._last_events == len(self.buffer.ids)

    async def aclose(self) -> None:
        """Cancel what is left."""
        if self._closed:
            return
        self._closed = True
        self._timeout.close()
        self.buffer.arrival.set()  # another coroutine may be waiting for an event
        if not self._exhausted:
            self.buffer.abandon()  # first: this coroutine may be cancelled below
            await asyncio.to_thread(self._wait_for_end)

    def _wait_for_end(self) -> None:
        if self._opening.exception() is None:
            self._engine.core.drop(self.buffer.ids)

    def __del__(self, finalizing=sys.is_finalizing):
        if not self._closed and not finalizing() and not self._exhausted:
            self.buffer.abandon()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class AsyncReply(AsyncIterator[Event]):
    """An answer as it is generated. The session gets its turn when it is complete or stopped; closing it adds none."""

    def __init__(self, recorder: ReplyRecorder, stream: AsyncStream):
        self._recorder, self._stream = recorder, stream

    async def __anext__(self) -> Event:
        return self._recorder.record(await anext(self._stream))

    async def completion(self) -> Completion:
        """The full answer."""
        async for _ in self:
            continue
        return self._recorder.complete()

    async def text(self) -> str:
        """The full answer's."""
        return (await self.completion()).text

    @property
    def events(self) -> list[Event]:
        """Those that were read."""
        return self._recorder.events

    @property
    def dropped_turns(self) -> int:
        """Turns that were given up to fit the context."""
        return self._recorder.dropped_turns

    async def stop(self) -> None:
        """End the answer here: its last event follows, and what came is kept. Before a first token nothing is."""
        self._recorder.stopped = True
        await self._stream.cancel()

    async def aclose(self) -> None:
        """End the answer here; neither it nor its question is kept."""
        await self._stream.aclose()

    def __repr__(self) -> str:
        return f"<AsyncReply: {self._recorder.describe()}>"
