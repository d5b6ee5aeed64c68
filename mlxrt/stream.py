"""The events of one call, as an iterator that cancels what is left when it is closed."""

from collections.abc import Callable, Iterator
from typing import Self

from .request import Event


class Stream(Iterator[Event]):
    def __init__(self, ids: list[int], take: Callable[[list[int]], Event], cancel: Callable[[int], None]):
        self.ids = list(ids)
        self._take, self._cancel = take, cancel

    def __next__(self) -> Event:
        if not self.ids:
            raise StopIteration
        event = self._take(self.ids)
        if event.finish_reason:
            self.ids.remove(event.id)
        return event

    def close(self) -> None:
        while self.ids:
            self._cancel(self.ids.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def __del__(self):
        self.close()
