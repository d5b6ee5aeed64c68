"""Places in a group's memory, given out and taken back.

A `Block` is held by the states that name it and goes back to the pool when the last of them is gone, exactly as
the buffer of an array does. So nobody retains or releases, and a prefix that leaves the store cannot pull a block
from under a live sequence.
"""

from ..errors import EvictedBlock, NoRoom


class Block:
    """One place. `filled` slots of it are promised to somebody; whoever stands exactly there may write on."""

    __slots__ = ("_pool", "filled", "generation", "id")

    def __init__(self, pool: "BlockPool", id: int, generation: int, filled: int):
        self._pool, self.id, self.generation, self.filled = pool, id, generation, filled

    def __del__(self):
        self._pool.free(self)

    def check(self) -> int:
        """The id, if the place is still ours."""
        now = self._pool.generations[self.id]
        if now != self.generation:
            raise EvictedBlock(
                f"block {self.id} is at generation {now}, the handle at {self.generation}; recompute the prefix"
            )
        return self.id


class BlockPool:
    """Starts small and doubles up to its limit. Place 0 is nowhere: padding reads it and idle rows write it.

    Sizes and copies are only promised here; the runner makes them true before the next step.
    """

    def __init__(self, size: int, limit: int | None = None):
        self.size, self.limit = size, max(limit or size, size)
        self.generations = [0] * size
        self.revoked = 0  # handles that turned stale: while this stands still, blocks once checked need no checking
        self.copies: list[tuple[Block, Block]] = []
        self._idle = list(range(size - 1, 0, -1))

    @property
    def idle(self) -> int:
        """Places that can be given out now, those the pool may still grow by included."""
        return len(self._idle) + self.limit - self.size

    @property
    def used(self) -> int:
        return self.size - 1 - len(self._idle)

    def take(self, n: int = 1) -> list[Block]:
        if n > self.idle:
            raise NoRoom(f"{n} blocks wanted, {self.idle} of {self.limit - 1} idle", self)
        while n > len(self._idle):
            self._extend(min(self.limit, 2 * self.size))
        return [Block(self, id, self.generations[id], 0) for id in (self._idle.pop() for _ in range(n))]

    def _extend(self, size: int) -> None:
        self._idle[:0] = range(size - 1, self.size - 1, -1)  # in place: another thread may be giving a block back
        self.generations += [0] * (size - self.size)
        self.size = size

    def free(self, block: Block) -> None:
        if self.generations[block.id] == block.generation:
            self.generations[block.id] += 1
            self._idle.append(block.id)

    def revoke(self, block: Block) -> None:
        """Take a place back while somebody still names it: the handle turns stale and raises."""
        self.revoked += 1
        self.free(block)
