"""The end of a process whose threads have used MLX.

MLX keeps compiled functions per thread, and destroying them takes Python's lock. A thread that asks for that lock while
the interpreter ends is killed where it stands (up to Python 3.13); inside a C++ destructor, or under a running step,
that aborts the whole process (exit code 134). So at exit no thread may be in the middle of either: running steps
finish, further ones wait for ever, and threads that have ended for Python are waited for until the system has ended
them too: `join` does so from 3.13 on, but a thread that nobody joins may still be at it.
"""

import atexit
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

MAX_STEP = 60.0  # seconds a running step may take to its end
MAX_ENDING = 5.0  # a thread that hangs must not keep the process from ending
MAX_OUTSIDE = 0.5  # for threads that are alive and in code of the user's
MAX_TRACKED = 256  # ended threads are forgotten beyond this


class Steps(Protocol):
    """Something that threads step or wait for."""

    @property
    def owner_thread(self) -> int | None:
        """The thread inside it, if there is one."""

    def wake(self) -> None:
        """Wake the threads that sleep in it, so that they come to `block_if_exiting`."""


class _Mine(threading.local):
    tracked = False


_mine = _Mine()
_lock = threading.Lock()
_tracked: dict[int, int] = {}  # threads that have used MLX through an engine: id of the system -> Python's
_blocked: set[int] = set()
_registered: weakref.WeakSet[Steps] = weakref.WeakSet()
_exiting = False


def track_thread() -> None:
    """Note that this thread uses MLX."""
    if _mine.tracked:
        return
    _mine.tracked = True
    with _lock:
        if len(_tracked) > MAX_TRACKED:
            for native in [n for n, ident in _tracked.items() if has_ended(n, ident)]:
                del _tracked[native]
        _tracked[threading.get_native_id()] = threading.get_ident()


def block_if_exiting() -> None:
    """Never returns on a second thread of a process that is ending."""
    if _exiting and threading.current_thread() is not threading.main_thread():
        _blocked.add(threading.get_ident())
        forever = threading.Lock()
        forever.acquire()
        forever.acquire()


def is_exiting() -> bool:
    return _exiting


def register_steps(steps: Steps) -> None:
    """Let what runs there finish when the process ends."""
    _registered.add(steps)


def has_ended(native: int, ident: int) -> bool:
    """Whether the system has ended a thread, and with it destroyed what it kept."""
    if sys.platform == "linux":
        return not os.path.exists(f"/proc/self/task/{native}")
    if sys.platform == "darwin":  # which looks the thread up; elsewhere asking about an ended one is undefined
        try:
            signal.pthread_kill(ident, 0)
        except OSError:
            return True
    return False


@atexit.register
def end_threads() -> None:
    global _exiting
    _exiting = True
    registered, me = list(_registered), threading.get_ident()
    for steps in registered:
        steps.wake()
    wait_until(lambda: all(steps.owner_thread in (None, me) for steps in registered), MAX_STEP)
    wait_until(lambda: not (alive() & set(_tracked.values())) - _blocked - {me}, MAX_OUTSIDE)
    ended = [(native, ident) for native, ident in list(_tracked.items()) if ident not in alive()]
    wait_until(lambda: all(has_ended(*thread) for thread in ended), MAX_ENDING)


def alive() -> set[int | None]:
    return {thread.ident for thread in threading.enumerate()}


def wait_until(done: Callable[[], bool], most: float) -> None:
    began = time.monotonic()
    while not done() and time.monotonic() - began < most:
        time.sleep(0.002)
