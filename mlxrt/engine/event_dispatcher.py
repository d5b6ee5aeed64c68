"""Where threads wait for the events of their requests. One of them makes the steps, for all.

Knows tickets and threads; what a step is, it is told.
"""

import threading
from collections.abc import Callable

from ..errors import EngineClosed
from .output import Ticket
from .request import Event

NOTHING_MOVES = 0.05  # seconds until a look again, where all that is left waits for a slow reader elsewhere


class Desk:
    def __init__(self, step: Callable[[], bool]):
        self.tickets: dict[int, Ticket] = {}
        self._step = step
        self._news = threading.Condition(threading.Lock())
        self._stepping: int | None = None  # the thread that does
        self._shut: Callable[[], EngineClosed] | None = None

    def take(self, ids: list[int]) -> Event:
        """The next event of any of these requests. Whoever finds nobody making steps makes one itself."""
        while True:
            with self._news:
                if event := self._ready(ids):
                    return event
                if self._stepping not in (None, threading.get_ident()):  # its own: a callback; `step` refuses that
                    self._news.wait()
                    continue
                self._stepping = threading.get_ident()
            moved = False
            try:
                moved = self._step()
            finally:
                with self._news:
                    self._stepping = None
                    self._news.notify_all()
                    if not moved and self._shut is None and not any(self._inbox(id) for id in ids):
                        self._news.wait(NOTHING_MOVES)

    def _inbox(self, id: int) -> bool:
        return id in self.tickets and bool(self.tickets[id].inbox)

    def _ready(self, ids: list[int]) -> Event | None:
        if self._shut is not None:
            raise self._shut()
        for id in ids:
            ticket = self.tickets[id]
            if ticket.inbox:
                event = ticket.inbox.popleft()
                if event.finish_reason:
                    del self.tickets[id]
                return event
        return None

    def collect(self, id: int) -> list[Event]:
        """What came for a request since it was last asked for. Makes no step."""
        with self._news:
            if self._shut is not None:
                raise self._shut()
            events = list(self.tickets[id].inbox)
            self.tickets[id].inbox.clear()
            if events and events[-1].finish_reason:
                del self.tickets[id]
            return events

    def wake(self) -> None:
        """Something may have changed for whoever waits."""
        with self._news:
            self._news.notify_all()

    def shut(self, error: Callable[[], EngineClosed]) -> None:
        """From now on nobody gets an event, everybody this error."""
        with self._news:
            self._shut = self._shut or error
            self._news.notify_all()
