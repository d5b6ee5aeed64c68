"""KV blocks on the host: ids in a group's pool, allocated and freed.

A `Block` is held by the states that name it and returns to the pool when the last of them is gone, exactly as the
buffer of an array does. So there is no reference count to keep by hand, and evicting a prefix cannot free a block that
a live sequence uses.
"""

from collections.abc import Callable

from ..errors import EvictedBlock, NoRoom


class Block:
    """A KV block. Only a sequence whose length equals `filled` may append in place; others copy first."""

    __slots__ = ("_pool", "filled", "generation", "id")

    def __init__(self, pool: "BlockPool", id: int, generation: int, filled: int):
        self._pool, self.id, self.generation, self.filled = pool, id, generation, filled

    def __del__(self):
        self._pool.free(self)

    def check(self) -> int:
        """The id; raises EvictedBlock if the handle is stale."""
        now = self._pool.generations[self.id]
        if now != self.generation:
            raise EvictedBlock(f"block {self.id} has generation {now}, its handle {self.generation}; recompute it")
        return self.id


class BlockPool:
    """Allocates block ids. Starts small and doubles up to its limit; block 0 is a dummy for padding and idle rows.

    Growth and copies are only recorded here; `KVPools.apply_pending` carries them out before the next step. Where the
    device has no memory for growth that was planned, the limit is what there is, until there is more.
    """

    def __init__(self, size: int, limit: int | None = None):
        self.size, self.limit = size, max(limit or size, size)
        self.planned_limit = self.limit
        self.max_size: Callable[[int], int] | None = None  # the largest size up to one that the device holds
        self.shortage = ""  # why the limit is below the planned one
        self.generations = [0] * size
        self.copies: list[tuple[Block, Block]] = []
        self._free = list(range(size - 1, 0, -1))

    @property
    def available(self) -> int:
        """Blocks that can be allocated now, including those the pool may still grow by."""
        return len(self._free) + self.limit - self.size

    @property
    def used(self) -> int:
        return self.size - 1 - len(self._free)

    def allocate(self, n: int = 1) -> list[Block]:
        if n > len(self._free) and self.max_size is not None:
            self._set_limit(n, self.max_size)
        if n > self.available:
            short = f"; {self.shortage}" if self.shortage else ""
            raise NoRoom(f"{n} blocks wanted, {self.available} of {self.limit - 1} free{short}", self)
        while n > len(self._free):
            self._extend(min(self.limit, 2 * self.size))
        return [Block(self, id, self.generations[id], 0) for id in (self._free.pop() for _ in range(n))]

    def _set_limit(self, n: int, max_size: Callable[[int], int]) -> None:
        """Ask the device whether it can hold the growth that n more blocks take."""
        wanted = self.size
        while n > len(self._free) + wanted - self.size and wanted < self.planned_limit:
            wanted = min(self.planned_limit, 2 * wanted)
        fits = max_size(wanted)
        self.limit = self.planned_limit if fits >= wanted else max(self.size, fits)

    def _extend(self, size: int) -> None:
        self._free[:0] = range(size - 1, self.size - 1, -1)  # in place: another thread may be freeing a block
        self.generations += [0] * (size - self.size)
        self.size = size

    def free(self, block: Block) -> None:
        """Take a block back. A handle that is left of it is stale from here on: its generation has passed."""
        if self.generations[block.id] == block.generation:
            self.generations[block.id] += 1
            self._free.append(block.id)
