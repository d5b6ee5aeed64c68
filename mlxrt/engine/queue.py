"""The waiting queue, and the prefixes that are being prefilled. Imports no mlx."""

import heapq
from collections.abc import Iterator
from collections.abc import Sequence as Many

from .sequence import Sequence


class WaitingQueue:
    """Requests that have not been admitted: by priority, first come first served within one, without starvation.

    A request of priority p ranks like one of priority 0 that arrived p * `age` seconds earlier. So two requests never
    change their order, and a request that arrives more than that much later cannot overtake.
    """

    def __init__(self, age: float):
        self.age = age
        self._members: dict[int, Sequence] = {}
        self._heap: list[tuple[float, int]] = []  # (rank, id): holds no sequence that has left

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._members.values())

    def __contains__(self, seq: Sequence) -> bool:
        return seq.id in self._members

    def add(self, seq: Sequence, now: float) -> None:
        """A request that arrived now."""
        seq.queue_key = now - self.age * seq.request.priority
        self.requeue(seq)

    def requeue(self, seq: Sequence) -> None:
        """Back to its old rank, before everything that arrived later."""
        self._members[seq.id] = seq
        heapq.heappush(self._heap, (seq.queue_key, seq.id))

    def park(self, seq: Sequence) -> None:
        """Waits, but `pop` does not return it until it is requeued."""
        self._members[seq.id] = seq

    def remove(self, seq: Sequence) -> None:
        """Out of the middle. Its heap item is skipped when it comes to the front."""
        del self._members[seq.id]
        if len(self._heap) > 2 * len(self._members) + 64:
            self._heap = [item for item in self._heap if item[1] in self._members]
            heapq.heapify(self._heap)

    def pop(self) -> Sequence | None:
        """Take the first in rank; None when all that wait are parked."""
        while self._heap:
            if (seq := self._members.pop(heapq.heappop(self._heap)[1], None)) is not None:
                return seq
        return None


class Deadlines:
    """Sequences that must end in time. Forgets those that end before."""

    def __init__(self) -> None:
        self._members: dict[int, Sequence] = {}
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, seq: Sequence, deadline: float) -> None:
        self._members[seq.id] = seq
        heapq.heappush(self._heap, (deadline, seq.id))

    def discard(self, seq: Sequence) -> None:
        if self._members.pop(seq.id, None) is not None and len(self._heap) > 2 * len(self._members) + 64:
            self._heap = [item for item in self._heap if item[1] in self._members]
            heapq.heapify(self._heap)

    def pop_expired(self, now: float) -> list[Sequence]:
        expired: list[Sequence] = []
        while self._heap and (self._heap[0][1] not in self._members or self._heap[0][0] <= now):
            if (seq := self._members.pop(heapq.heappop(self._heap)[1], None)) is not None:
                expired.append(seq)
        return expired


class InflightPrefixes:
    """Deduplicates in-flight prefills: a request that shares a prefix with one being prefilled waits for it.

    Knows tokens, not memory: what a follower then finds is up to the prefix cache. Prefixes are counted in full nodes
    of `size` tokens; a node's key is a hash of it and of all before it.
    """

    def __init__(self, size: int):
        self.size = size
        self._owner_of: dict[int, Sequence] = {}  # node -> the sequence that computes it
        self._claimed: dict[Sequence, list[int]] = {}
        self._followers: dict[Sequence, dict[Sequence, int]] = {}  # owner -> follower -> tokens it waits for
        self._following: dict[Sequence, Sequence] = {}  # follower -> owner

    def hash_nodes(self, tokens: Many[int], salt: str = "") -> list[int]:
        keys, key = [], hash(salt)
        for end in range(self.size, len(tokens) + 1, self.size):
            key = hash((key, *tokens[end - self.size : end]))
            keys.append(key)
        return keys

    def claim(self, seq: Sequence) -> None:
        """A sequence begins its prefill; nodes that another one computes stay with that one."""
        new = [
            key
            for key in self.hash_nodes(seq.prompt, seq.request.cache_salt)[seq.length // self.size :]
            if key not in self._owner_of
        ]
        if new:
            self._owner_of.update(dict.fromkeys(new, seq))
            self._claimed[seq] = new

    def follow(self, seq: Sequence, stored: int) -> bool:
        """Let a sequence wait for the one that computes more of its prompt than is `stored`; False if none does."""
        if not self._owner_of or seq.followed:
            return False
        keys = self.hash_nodes(seq.prompt[:-1], seq.request.cache_salt)  # one token is always left to compute
        for n in range(len(keys), stored // self.size, -1):
            if owner := self._owner_of.get(keys[n - 1]):
                self._followers.setdefault(owner, {})[seq] = n * self.size
                self._following[seq] = owner
                return True
        return False

    def pop_ready(self) -> list[tuple[Sequence, Sequence]]:
        """(owner, follower) where what the follower waits for is computed and checked. A sequence follows only once."""
        ready = [
            (owner, seq)
            for owner, line in self._followers.items()
            for seq, n in line.items()
            if min(owner.length, owner.unchecked) >= n
        ]
        for _, seq in ready:
            self.unfollow(seq)
            seq.followed = True
        return ready

    def release(self, owner: Sequence) -> list[Sequence]:
        """A sequence ends its prefill; the followers that still waited for it."""
        for key in self._claimed.pop(owner, ()):
            del self._owner_of[key]
        left = list(self._followers.get(owner, ()))
        for seq in left:
            self.unfollow(seq)
        return left

    def unfollow(self, seq: Sequence) -> None:
        owner = self._following.pop(seq, None)
        if owner is not None:
            del self._followers[owner][seq]
            if not self._followers[owner]:
                del self._followers[owner]
