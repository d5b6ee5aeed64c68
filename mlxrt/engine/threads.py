"""What lets threads share an engine: a fair lock, Ctrl-C between steps, and MLX streams that outlive a thread."""

import _signal  # what `signal` wraps: its names make an enum of every handler, which is a tenth of a step's Python
import signal
import threading
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

import mlx.core as mx


class FairLock:
    """A reentrant lock that is handed over in the order threads asked for it.

    A plain lock lets the thread that just released it take it again: one that steps an engine token after token would
    keep the others out.
    """

    def __init__(self) -> None:
        self._state = threading.Lock()  # held for a few instructions only
        self._waiters: deque[tuple[int, threading.Lock]] = deque()
        self._owner: int | None = None
        self._depth = 0

    @property
    def owner(self) -> int | None:
        return self._owner

    @property
    def mine(self) -> bool:
        return self._owner == threading.get_ident()

    def acquire(self) -> None:
        me = threading.get_ident()
        if self._owner == me:
            self._depth += 1
            return
        with self._state:
            if self._owner is None:
                self._owner, self._depth = me, 1
                return
            wakeup = threading.Lock()
            wakeup.acquire()
            self._waiters.append((me, wakeup))
        try:
            wakeup.acquire()
        except BaseException:  # Ctrl-C: the lock must not be handed to a thread that has left
            self._give_up(me, wakeup)
            raise

    def _give_up(self, me: int, wakeup: threading.Lock) -> None:
        with self._state:
            if (me, wakeup) in self._waiters:
                self._waiters.remove((me, wakeup))
                return
        self.release()

    def try_acquire(self) -> bool:
        """Take the lock if no thread has it, this one included. Never blocks, so a finaliser may call it."""
        if not self._state.acquire(blocking=False):
            return False
        try:
            if self._owner is not None:
                return False
            self._owner, self._depth = threading.get_ident(), 1
            return True
        finally:
            self._state.release()

    def release(self) -> None:
        self._depth -= 1
        if self._depth:
            return
        with self._state:
            if self._waiters:
                self._owner, wakeup = self._waiters.popleft()
                self._depth = 1
                wakeup.release()
            else:
                self._owner = None


class Interrupt:
    """Defers Ctrl-C while `defer()` is true and sets `requested`. A second Ctrl-C is not deferred; but where the first
    has called `stop`, which ends the work without an exception, others change nothing.

    An exception in the middle of a step would leave the engine's state half written. Where SIGINT is ignored (a
    script's background job, nohup) it stays ignored.
    """

    def __init__(self, defer: Callable[[], bool], stop: Callable[[], None] | None = None):
        self.requested, self._defer, self._stop = False, defer, stop
        self._before: Any = None

    def __enter__(self) -> Self:
        if _signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            self._before = _signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_) -> None:
        if self._before is not None:
            _signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._defer() or (self.requested and self._stop is None):
            raise KeyboardInterrupt
        if not self.requested and self._stop is not None:
            self._stop()
        self.requested = True


class StepInterrupt(Interrupt):
    """Defers Ctrl-C until a step is over, where Python's default handler is installed."""

    def __init__(self) -> None:
        super().__init__(lambda: True)

    def __enter__(self) -> Self:
        main = threading.current_thread() is threading.main_thread()  # the only one that gets signals
        if main and _signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            super().__enter__()
        return self


# MLX cannot end a stream, and on a CPU each keeps a thread: a closed engine returns its stream for the next one.
_free_streams: dict[mx.DeviceType, list[mx.Stream]] = {}


def acquire_stream() -> mx.Stream:
    """A stream that any thread may use."""
    device = mx.default_device()
    try:
        return _free_streams.setdefault(device.type, []).pop()
    except IndexError:
        return mx.new_thread_unsafe_stream(device)


def release_stream(stream: mx.Stream) -> None:
    _free_streams.setdefault(stream.device.type, []).append(stream)
