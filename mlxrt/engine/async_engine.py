"""The engine for asyncio: one thread steps, coroutines await events."""

import asyncio
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack, overload

import mlx.core as mx

from ..config import EngineConfig, check_number
from ..errors import EngineClosed
from .async_stream import AsyncReply, AsyncStream, EventBuffer, LoopReaders
from .engine import Engine, is_many, read_requests
from .options import EngineOptions, GenerateOptions, Prompt, Prompts, spell_out
from .output import complete_all
from .process_exit import is_exiting, register_steps
from .request import Completion, EngineEvent, Request
from .session import PromptPlan, ReplyRecorder, Session
from .stats import Stats

log = logging.getLogger("mlxrt")

T = TypeVar("T")
UNBOUNDED = 1 << 62


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

    @property
    def messages(self) -> tuple[dict[str, Any], ...]:
        """The conversation so far."""
        return self.session.messages

    @property
    def tokens(self) -> tuple[int, ...]:
        """The last prompt and its answer."""
        return self.session.tokens

    def __repr__(self) -> str:
        return f"<Async{repr(self.session)[1:]}"

    def fork(self) -> "AsyncSession":
        """A session that goes its own way from here."""
        return AsyncSession(self.session.fork(), self._stream)

    def rewind(self, turns: int = 1) -> None:
        """Forget the last questions and answers."""
        self.session.rewind(turns)

    async def save(self, path: str | Path, name: str | None = None) -> None:
        """Write the conversation and its KV state atomically."""
        await asyncio.to_thread(self.session.save, path, name)

    @classmethod
    @spell_out(GenerateOptions)
    async def restore(
        cls,
        engine: "AsyncEngine",
        path: str | Path,
        name: str | None = None,
        on_overflow: str = "error",
        **options: Unpack[GenerateOptions],
    ) -> "AsyncSession":
        """The session that was saved there, by either kind; `name` picks one of an archive."""
        session = await asyncio.to_thread(Session.restore, engine.engine, path, name, on_overflow, **options)
        return cls(session, engine.stream_plan)


class EngineThread:
    """Steps an engine, and runs jobs between two steps. Knows no AsyncEngine, so that one can be deleted."""

    def __init__(self, engine: Engine, buffer: int):
        self._engine, self._buffer = engine, buffer
        self._jobs: deque[tuple[Callable[[], Any], Future]] = deque()
        self._encoder = ThreadPoolExecutor(
            1, "mlxrt encoder"
        )  # one: requests are submitted in the order of their calls
        self._unencoded: deque[tuple[Future[list[int]], EventBuffer, list[Request]]] = deque()
        self._readers: dict[asyncio.AbstractEventLoop, LoopReaders] = {}
        self._work = threading.Condition()  # reentrant: `release` runs in finalisers
        self._ending = False  # nothing new is accepted; what is there is finished
        self._ended = self._released = False
        self.owner_thread = None  # as its engine says
        register_steps(self)
        self._thread = threading.Thread(target=self._run, name="mlxrt engine", daemon=True)
        self._thread.start()

    # On other threads

    def post(self, job: Callable[[], T]) -> "Future[T]":
        """Run a job on the engine's thread, between two steps."""
        done: Future[T] = Future()
        with self._work:
            if self._ended or self._ending:
                done.set_exception(self._closing_error())
                return done
            self._jobs.append((job, done))
            self._work.notify_all()
        return done

    def open(
        self, buffer: EventBuffer, requests: list[Request], prompts: Sequence[tuple[int, ...]]
    ) -> "Future[list[int]]":
        """Submit requests whose events go to a buffer. `prompts`: their tokens."""

        def open() -> list[int]:
            readers = self._readers.setdefault(buffer.loop, LoopReaders(buffer.loop))
            return buffer.open(readers, requests, prompts)

        return self.post(open)

    def encode_and_open(self, buffer: EventBuffer, requests: list[Request]) -> "Future[list[int]]":
        """As `open`, once prompts are encoded and grammars compiled: on a thread of its own, since a long text or a
        large schema takes seconds, in which the others' tokens would wait."""
        opened: Future[list[int]] = Future()
        self._unencoded.append((opened, buffer, requests))
        try:
            self._encoder.submit(self._encode_next)
        except RuntimeError:  # it was shut down
            self._unencoded.remove((opened, buffer, requests))
            opened.set_exception(self._closing_error())
        return opened

    def _encode_next(self) -> None:
        opened, buffer, requests = self._unencoded.popleft()
        try:
            if not opened.set_running_or_notify_cancel():
                return
            prompts = [] if buffer.abandoned else [self._engine.encode(request) for request in requests]
            for request in requests[: len(prompts)]:
                self._engine.compile_grammar(request)
            self.open(buffer, requests, prompts).add_done_callback(partial(copy_result, to=opened))
        except Exception as error:  # raised where the caller awaits it
            opened.set_exception(error)
        finally:
            del opened  # an error's traceback holds this frame and its callers', and `opened` the error

    def _closing_error(self) -> EngineClosed:
        return self._engine.core.closed_error("the engine is closing and accepts nothing new")

    def capacity(self) -> int:
        """Events of a stream that may wait; once the engine is ending, any number."""
        return UNBOUNDED if self._ending else self._buffer

    def end(self) -> None:
        """Accept nothing new; the thread ends when what is there is finished."""
        with self._work:
            self._ending = True
            self._work.notify_all()

    def release(self) -> None:
        """End for want of anybody who could ask for anything. The engine stays open: it may have other users."""
        self._released = True
        self.end()

    def join(self) -> None:
        self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    # On the thread

    def _run(self) -> None:
        core = self._engine.core
        try:
            while self._wait():
                self._run_jobs()
                self._drop_unreadable()
                if self._ending:
                    core.resume_all()
                if core.busy and not core.step():
                    with self._work:
                        if not self._jobs:  # all that is left waits for its readers, or for its deadline
                            self._work.wait(0.1)
        except EngineClosed:  # every caller has got the error, from the step that failed or from `close`
            return
        except Exception:
            if core.failure is None:  # otherwise it was logged where the engine stopped
                log.exception("the thread that steps the engine has ended")
        finally:
            self._end()

    def wake(self) -> None:
        """Let the thread look again whether there is something to do."""
        with self._work:
            self._work.notify_all()

    def _wait(self) -> bool:
        """Sleep until there is something to do; False when nothing ever will be."""
        with self._work:
            while not self._jobs and not self._engine.core.busy and not self._ending and not is_exiting():
                self._work.wait()
            return not self._released and not is_exiting() and (bool(self._jobs) or self._engine.core.busy)

    def _run_jobs(self) -> None:
        while self._jobs:
            job, done = self._jobs.popleft()
            if not done.set_running_or_notify_cancel():
                continue
            try:
                done.set_result(job())
            except Exception as error:  # raised where the caller awaits it
                done.set_exception(error)
            finally:
                del job, done  # an error's traceback holds this frame, and `done` the error

    def _drop_unreadable(self) -> None:
        """No coroutine runs on a closed loop, and a request that is paused sends nothing: it would never notice."""
        for loop, readers in list(self._readers.items()):
            if loop.is_closed():
                for buffer in list(readers.buffers):
                    buffer.abandon()
            if loop.is_closed() or not readers.buffers:
                del self._readers[loop]

    def _end(self) -> None:
        """However the thread ends, nothing waits for it any more."""
        with self._work:
            self._ended = True
            left, self._jobs = self._jobs, deque()
        self._encoder.shutdown(wait=False)  # what it has yet to encode is refused when it is posted
        try:
            if not self._released:
                self._engine.close()
        finally:
            for _, done in left:
                if done.set_running_or_notify_cancel():
                    done.set_exception(self._engine.core.closed_error("the engine was closed before the request began"))


def copy_result(done: Future, to: Future) -> None:
    if (error := done.exception()) is not None:
        to.set_exception(error)
    else:
        to.set_result(done.result())


class AsyncEngine:
    """An engine and the thread that steps it. `buffer` events of a stream may wait to be read."""

    def __init__(self, engine: Engine, buffer: int = 64):
        buffer = check_number("buffer", buffer, int, 1, 1 << 31, "a whole number >= 1")
        self.engine, self.buffer = engine, buffer
        self.thread = EngineThread(engine, buffer)
        self._release_thread = weakref.finalize(self, self.thread.release)  # if it is never closed
        self._release_thread.atexit = False

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
            order, events = await stream.wait_submitted(), await stream.read_all()
        done = complete_all(order, events)
        return done if is_many(x) else done[0]

    @spell_out(GenerateOptions)
    def stream(self, x: Prompt | Prompts, **options: Unpack[GenerateOptions]) -> AsyncStream:
        """Events as they come. Leaving the `async with`, or `aclose`, cancels what is left."""
        return self._open_stream(read_requests(x, options))

    def stream_encoded(self, requests: list[Request], prompts: Sequence[tuple[int, ...]]) -> AsyncStream:
        """As `stream`, for requests whose prompts are tokens already (`engine.encode`, on any thread): a long
        template or text then delays nobody else's tokens."""
        return self._open_stream(requests, prompts)

    def _open_stream(self, requests: list[Request], prompts: Sequence[tuple[int, ...]] | None = None) -> AsyncStream:
        buffer = EventBuffer(self.engine, asyncio.get_running_loop(), self.thread.capacity, self.thread.post)
        thread = self.thread
        opening = (
            thread.encode_and_open(buffer, requests) if prompts is None else thread.open(buffer, requests, prompts)
        )
        return AsyncStream(self.engine, buffer, opening, owner=self)

    async def score(self, tokens: Sequence[int], chunk: int | None = None) -> mx.array:
        """What `Engine.score` gives."""
        return await asyncio.to_thread(self.engine.score, tokens, chunk)

    async def stats(self) -> Stats:
        """What `Engine.stats` gives."""
        return await asyncio.to_thread(self.engine.stats)

    @property
    def failure(self) -> BaseException | None:
        """Why the engine stopped by itself, if it did."""
        return self.engine.core.failure

    async def cancel(self, id: int) -> None:
        """End a request; its reader gets a last event."""
        await asyncio.wrap_future(self.thread.post(lambda: self.engine.cancel(id)))

    @spell_out(GenerateOptions)
    def session(
        self, system: str | None = None, on_overflow: str = "error", **options: Unpack[GenerateOptions]
    ) -> AsyncSession:
        """A conversation whose answers are awaited."""
        return AsyncSession(Session(self.engine, system, dict(options), on_overflow), self.stream_plan)

    def stream_plan(self, plan: PromptPlan) -> AsyncStream:
        """The events of a session's next answer."""
        return self._open_stream([plan.request], [plan.tokens])

    async def close(self, finish: bool = False) -> None:
        """Stop the thread and close the engine: at once (callers get EngineClosed), or when all requests are done."""
        self.thread.end()
        if not finish:
            await asyncio.to_thread(self.engine.close)
            self.thread.end()  # it may be waiting for readers
        await asyncio.to_thread(self.thread.join)
        await asyncio.to_thread(self.engine.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type | None, *_: object) -> None:
        await self.close(finish=kind is None)
