"""A time limit for each of a task's many short waits.

`asyncio.wait_for` makes a task for every wait, and `asyncio.timeout` a timer: for a server that waits twice a token
that was half of its work. Here one timer of the event loop serves all waits, and is moved on only when it fires.
"""

import asyncio
from types import TracebackType
from typing import Self


class RepeatedTimeout:
    """`with timeout.within(seconds): await ...` raises TimeoutError when the time is over; as often as one likes, for
    one wait at a time."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task | None = None  # that waits now
        self._due = 0.0  # when its time is over
        self._expired = False
        self._cancelling = 0  # how often the task had been cancelled before the wait

    def within(self, seconds: float) -> Self:
        loop = asyncio.get_running_loop()
        self._due = loop.time() + seconds
        if self._timer is not None and self._timer.when() > self._due:
            self.close()
        if self._timer is None:
            self._timer = loop.call_at(self._due, self._fire, loop)
        return self

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None and self._task is None, "one task waits at a time"
        self._task, self._cancelling = task, task.cancelling()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        expired, self._expired = self._expired, False
        # Somebody else may have cancelled the task, too: then that is what it hears.
        if expired and task is not None and task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def _fire(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if self._task is None or self._expired:
            return  # nobody waits: the next wait makes a timer
        if loop.time() < self._due:
            self._timer = loop.call_at(self._due, self._fire, loop)
        else:
            self._expired = True
            self._task.cancel()

    def close(self) -> None:
        """Let the timer go; a later wait makes another."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
