"""One thread at a time, in the order they asked.

A plain lock lets the thread that just gave it back take it again, for ever: one that steps an engine token after token
would keep everybody else out. Here whoever has waited longest is next.
"""

import threading
from collections import deque


class Turns:
    """A lock that is handed over in order. The thread that has the turn may take it again."""

    def __init__(self) -> None:
        self._books = threading.Lock()  # held for a few instructions only
        self._line: deque[tuple[int, threading.Lock]] = deque()
        self._owner: int | None = None
        self._depth = 0

    @property
    def mine(self) -> bool:
        return self._owner == threading.get_ident()

    def acquire(self) -> None:
        me = threading.get_ident()
        if self._owner == me:
            self._depth += 1
            return
        with self._books:
            if self._owner is None:
                self._owner, self._depth = me, 1
                return
            called = threading.Lock()
            called.acquire()
            self._line.append((me, called))
        try:
            called.acquire()
        except BaseException:  # Ctrl-C: nobody may hand the turn to a thread that has left
            self._give_up(me, called)
            raise

    def _give_up(self, me: int, called: threading.Lock) -> None:
        with self._books:
            if (me, called) in self._line:
                self._line.remove((me, called))
                return
        self.release()

    def try_acquire(self) -> bool:
        """Take the turn if nobody has it, also not this thread. Never waits, so a finaliser may ask."""
        if not self._books.acquire(blocking=False):
            return False
        try:
            if self._owner is not None:
                return False
            self._owner, self._depth = threading.get_ident(), 1
            return True
        finally:
            self._books.release()

    def release(self) -> None:
        self._depth -= 1
        if self._depth:
            return
        with self._books:
            if self._line:
                self._owner, called = self._line.popleft()
                self._depth = 1
                called.release()
            else:
                self._owner = None
