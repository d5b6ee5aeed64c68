"""The engine for asyncio: one thread makes the steps, coroutines wait for events without holding anybody up.

A reader that lags behind stops its own request and no other: its sequence is paused until the buffer has room again.
Everything here is about waiting; what is computed is the engine's business.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Self, TypeVar

from ..config import EngineConfig
from ..errors import BadRequest
from .async_session import AsyncSession
from .async_stream import AsyncStream
from .engine import Engine, is_many
from .output import complete
from .request import Completion, Request
from .session import Question, Session

T = TypeVar("T")
UNBOUNDED = 1 << 62


class AsyncEngine:
    """An engine and its thread. `buffer` events of a stream may wait to be read."""

    def __init__(self, engine: Engine, buffer: int = 64):
        if not isinstance(buffer, int) or isinstance(buffer, bool) or buffer < 1:
            raise BadRequest(f"buffer must be a whole number >= 1, not {buffer!r}")
        self.engine, self.buffer = engine, buffer
        self._jobs: deque[tuple[Callable[[], Any], Future]] = deque()
        self._work = threading.Condition(threading.Lock())
        self._ending = False  # nothing new is accepted; what is there is finished
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="mlxrt engine", daemon=True)
        self._thread.start()

    @classmethod
    async def load(cls, name: str, config: EngineConfig = EngineConfig(), **options: Any) -> "AsyncEngine":  # noqa: B008
        """As mlxrt.load, without holding up the loop."""
        from .load import load

        return cls(await asyncio.to_thread(lambda: load(name, config, **options)))

    # What callers use

    async def generate(self, x: Any, **options: Any) -> Any:
        """A Completion for one input, a list of them for a list of Requests."""
        async with self.stream(x, **options) as stream:
            order = await stream.begun()
            events: dict[int, list] = {id: [] for id in order}
            async for event in stream:
                events[event.id].append(event)
        for id in order:
            if error := events[id][-1].error:
                raise error
        done: list[Completion] = [complete(events[id]) for id in order]
        return done if is_many(x) else done[0]

    def stream(self, x: Any, **options: Any) -> AsyncStream:
        """Events as they come. Leaving the `async with`, or `aclose`, cancels what is left."""
        requests = [Request.of(r, **options) for r in (x if is_many(x) else [x])]
        stream = AsyncStream(self.engine, asyncio.get_running_loop(), self._most, self._post)
        stream.opening = self._post(lambda: stream.open(requests))
        return stream

    async def score(self, tokens: Any, chunk: int | None = None) -> Any:
        return await asyncio.to_thread(self.engine.score, tokens, chunk)

    async def stats(self) -> Any:
        return await asyncio.to_thread(self.engine.stats)

    async def cancel(self, id: int) -> None:
        """End a request; whoever reads it gets a last event."""
        await asyncio.wrap_future(self._post(lambda: self.engine.cancel(id)))

    def session(self, system: str | None = None, on_overflow: str = "error", **options: Any) -> AsyncSession:
        """A conversation whose answers are awaited."""

        def ask(question: Question, given: dict[str, Any]) -> AsyncStream:
            return self.stream(Request.of(list(question.tokens), **given))

        return AsyncSession(Session(self.engine, system, options, on_overflow), ask)

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

    def _most(self) -> int:
        """Events of a stream that may wait; once the end has come, all of them: nobody is waited for."""
        return UNBOUNDED if self._ending else self.buffer

    # The thread

    def _post(self, job: Callable[[], T]) -> "Future[T]":
        """Have the thread do something between two steps."""
        done: Future[T] = Future()
        with self._work:
            if self._ended or self._ending:
                done.set_exception(self.engine.farewell("the engine is closing and accepts nothing new"))
                return done
            self._jobs.append((job, done))
            self._work.notify_all()
        return done

    def _run(self) -> None:
        try:
            while self._wait():
                self._do_jobs()
                if self._ending:
                    self.engine.resume_all()
                if self.engine.busy and not self.engine.step():
                    with self._work:
                        if not self._jobs:  # all that is left waits for its readers, or for its deadline
                            self._work.wait(0.1)
        except Exception:  # the step that failed has told everybody, with its reason; so has whoever closed the engine
            return
        finally:
            self._leave()

    def _wait(self) -> bool:
        """Sleep until there is something to do; False when nothing ever will be."""
        with self._work:
            while not self._jobs and not self.engine.busy and not self._ending:
                self._work.wait()
            return bool(self._jobs) or self.engine.busy

    def _do_jobs(self) -> None:
        while self._jobs:
            job, done = self._jobs.popleft()
            if not done.set_running_or_notify_cancel():
                continue
            try:
                done.set_result(job())
            except Exception as error:  # the caller's mistake, told to the caller
                done.set_exception(error)

    def _leave(self) -> None:
        """However the thread ends, nobody waits for it any more."""
        with self._work:
            self._ended = True
            left, self._jobs = self._jobs, deque()
        self.engine.close()
        for _, done in left:
            if done.set_running_or_notify_cancel():
                done.set_exception(self.engine.farewell("the engine was closed before the request began"))
