"""The events of one call, for asyncio: an iterator with a bounded buffer between the engine's thread and its reader."""

import asyncio
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import Any, Self

from ..errors import EngineClosed
from .engine import Engine
from .request import Event, Request


class AsyncStream(AsyncIterator[Event]):
    def __init__(
        self,
        engine: Engine,
        loop: asyncio.AbstractEventLoop,
        most: Callable[[], int],
        post: Callable[[Callable[[], Any]], "Future[Any]"],
    ):
        self._engine, self._loop, self._most, self._post = engine, loop, most, post
        self.opening: Future[list[int]] | None = None
        self._ids: list[int] = []
        self._left: set[int] = set()  # those that have not ended
        self._events: deque[Event] = deque()
        self._unread = 0  # sent by the thread, not yet read; guarded by _count
        self._count = threading.Lock()
        self._paused: set[int] = set()
        self._news = asyncio.Event()
        self._closed = False

    # On the engine's thread

    def open(self, requests: list[Request]) -> list[int]:
        try:
            for request in requests:
                id = self._engine.submit(request, self._hear)
                self._ids.append(id)
                self._left.add(id)
        except BaseException:  # whatever it was: nobody will read what was submitted
            self._engine.abandon(self._ids)
            raise
        return list(self._ids)

    def _hear(self, event: Event) -> None:
        with self._count:
            self._unread += 1
            full = self._unread >= self._most() and event.finish_reason is None
            if full:
                self._paused.add(event.id)
        if full:
            self._engine.pause(event.id)
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._arrive, event)

    # On the loop

    def _arrive(self, event: Event) -> None:
        self._events.append(event)
        self._news.set()

    async def begun(self) -> list[int]:
        """The ids of the requests, in order. Raises what submitting them raised."""
        assert self.opening is not None
        return await asyncio.wrap_future(self.opening)

    async def __anext__(self) -> Event:
        if self._closed:
            raise StopAsyncIteration
        await self.begun()
        while not self._events:
            if not self._left:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        event = self._events.popleft()
        self._read()
        if event.finish_reason:
            self._left.discard(event.id)
        if isinstance(event.error, EngineClosed):
            raise event.error
        return event

    def _read(self) -> None:
        """There is room for one more; a paused request goes on when half of the buffer is free."""
        with self._count:
            self._unread -= 1
            waking = list(self._paused) if self._unread <= self._most() // 2 else []
            self._paused -= set(waking)
        if waking:
            self._post(lambda: self._resume(waking))

    def _resume(self, ids: list[int]) -> None:
        for id in ids:
            self._engine.resume(id)

    async def aclose(self) -> None:
        """Cancel what is left."""
        if self._closed:
            return
        self._closed = True
        await asyncio.to_thread(self._abandon)

    def _abandon(self) -> None:
        opening = self.opening
        if opening is None or opening.cancel():
            return  # the thread never saw it
        if opening.exception() is None and self._left:
            self._engine.abandon(list(self._left))

    def __del__(self, ending=sys.is_finalizing):
        if self._left and not self._closed and not ending():
            self._engine.abandon(list(self._left), wait=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
