"""Who has not begun yet: by priority, first come first served within one, and nobody for ever.

A request of priority p stands where one of priority 0 would that had come p times `age` seconds earlier. So waiting
raises everybody's rank alike, two requests never change their order, and whoever came more than that much later cannot
overtake. Knows no memory and no device.
"""

import heapq
from collections.abc import Iterator
from itertools import count

from .request import Sequence


class WaitingLine:
    def __init__(self, age: float):
        self.age = age
        self._members: dict[Sequence, None] = {}
        self._heap: list[tuple[float, int, int, Sequence]] = []
        self._entries = count()

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._members)

    def __contains__(self, seq: object) -> bool:
        return seq in self._members

    def join(self, seq: Sequence, now: float) -> None:
        """A request that came now."""
        seq.turn = now - self.age * seq.request.priority
        self.rejoin(seq)

    def rejoin(self, seq: Sequence) -> None:
        """Back to where it stood: in front of everybody who came after it."""
        self._members[seq] = None
        heapq.heappush(self._heap, (seq.turn, seq.id, next(self._entries), seq))

    def hold(self, seq: Sequence) -> None:
        """Waits, but is not called until it rejoins."""
        self._members[seq] = None

    def leave(self, seq: Sequence) -> None:
        """Out of the middle. Its place in the heap is passed over when it comes to the front."""
        del self._members[seq]
        if len(self._heap) > 2 * len(self._members) + 64:
            self._heap = [entry for entry in self._heap if entry[3] in self._members]
            heapq.heapify(self._heap)

    def next(self) -> Sequence | None:
        """The first in line leaves it."""
        while self._heap:
            seq = heapq.heappop(self._heap)[3]
            if seq in self._members:
                del self._members[seq]
                return seq
        return None
