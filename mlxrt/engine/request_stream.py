"""The events of one call, as an iterator that cancels what is left when it is closed."""

import sys
from collections.abc import Callable, Iterator
from typing import Self

from .request import Event


class Stream(Iterator[Event]):
    def __init__(self, ids: list[int], take: Callable[[list[int]], Event], drop: Callable[[list[int], bool], None]):
        self.ids = list(ids)
        self._take, self._drop, self._over = take, drop, False

    def __next__(self) -> Event:
        if not self.ids:
            if not self._over:
                self._over = True
                self._drop([], True)  # what is left to do can be done now, while nobody waits
            raise StopIteration
        event = self._take(self.ids)
        if event.finish_reason:
            self.ids.remove(event.id)
        return event

    def add(self, id: int) -> None:
        """Another request whose events come here."""
        self.ids.append(id)

    def close(self) -> None:
        self._leave(wait=True)

    def _leave(self, wait: bool) -> None:
        ids, self.ids = self.ids, []
        if ids:
            self._drop(ids, wait)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def __del__(self, ending=sys.is_finalizing):
        if not ending():  # then nothing is left to give back
            self._leave(wait=False)  # a finaliser runs anywhere, also where this very thread holds a lock
