"""What one sequence holds in one group of layers: immutable, a few integers, no arrays.

Layers that ask for the same memory form a group and share one state, so the work on the host does not grow with
the depth of the model.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Self

from ..errors import CannotRewind
from .blocks import Block, BlockPool

SHARED = -1  # no length is this one, so nobody may write on
SERIALS = count()


def serial() -> int:
    """A new state's is new, whoever makes it: only `BlockTable.grow` knows when the blocks stay."""
    return field(default_factory=SERIALS.__next__, init=False, compare=False)


class LayerState(ABC):
    pool: BlockPool
    length: int
    blocks: tuple[Block, ...]
    serial: int  # states of one number have the same blocks; it may be kept where holding blocks would pin them
    first = 0  # blocks let go in front
    sparse = False  # exists at some lengths only: checkpoints make it reusable

    @abstractmethod
    def grow(self, n: int) -> Self:
        """Room for n more tokens. Raises NoRoom and leaves everything as it was."""

    @abstractmethod
    def places(self, n: int) -> int:
        """About how many places a sequence of n tokens holds."""

    @property
    @abstractmethod
    def floor(self) -> int:
        """The state can be cut back to any length from here up to its own, and to 0."""

    @abstractmethod
    def cut(self, n: int) -> Self:
        """The state at n tokens; `rewind` has checked that it exists."""

    @abstractmethod
    def piece(self, i: int, size: int) -> Any:
        """What it gives the prefix store for the i-th node of `size` tokens; None where it has nothing."""

    @abstractmethod
    def adopt(self, pieces: Sequence[Any], n: int, size: int) -> Self | None:
        """The state of n tokens made of stored pieces, or None where they do not suffice."""

    def describe(self) -> dict[str, int]:
        """What `placed` needs beside the blocks to make the same state elsewhere."""
        return {}

    @abstractmethod
    def placed(self, blocks: tuple[Block, ...], n: int, described: dict[str, int]) -> Self:
        """An empty state's twin with n tokens in these blocks, which are its own."""

    @property
    def stops(self) -> tuple[int, ...]:
        """Lengths inside the last growth at which a sparse state exists too."""
        return ()

    def at(self, n: int) -> Self:
        """The state at one of the stops of its group's step, or at its own length."""
        return self.cut(n)

    def resume_point(self, limit: int) -> int:
        """The largest n <= limit this state can be cut back to."""
        n = min(limit, self.length)
        return n if n >= self.floor else 0

    def rewind(self, n: int) -> Self:
        if n < 0 or self.resume_point(n) != n:
            name = type(self).__name__
            raise CannotRewind(f"{name} can be cut to {self.floor}..{self.length} tokens or 0, not to {n}")
        return self.cut(n)


@dataclass(frozen=True)
class BlockTable(LayerState):
    """Keys and values in blocks of `size` tokens. With a window, blocks that fell out of it are let go.

    `slack` tokens beyond the window stay: what a decoding batch has not written to the pool yet must still have
    its place when it is (the tail is flushed late), and short rewinds stay exact without the store.
    """

    pool: BlockPool
    size: int
    window: int | None = None
    slack: int = 0
    blocks: tuple[Block, ...] = ()
    first: int = 0  # blocks let go in front
    length: int = 0
    serial: int = serial()

    def grow(self, n):
        out = 0 if self.window is None else max(self.first, (self.length - self.window - self.slack + 1) // self.size)
        blocks, end, at = self.blocks[out - self.first :], self.length + n, self.length % self.size
        shared = bool(at) and blocks[-1].filled != at  # somebody else wrote on in the last block
        wanted = -(-end // self.size) - out - len(blocks) + shared
        if wanted:  # else the same tuple goes on, and a decode step does not look at every block of a long text
            new = self.pool.take(wanted)
            if shared:
                self.pool.copies.append((blocks[-1], new[0]))
            blocks = (*blocks[: len(blocks) - shared], *new)
        for i in range(self.length // self.size, -(-end // self.size)):
            blocks[i - out].filled = min(self.size, end - i * self.size)
        # Not `replace`, which takes as long as all of the above: this happens for every sequence in every step.
        grown = BlockTable(self.pool, self.size, self.window, self.slack, blocks, out, end)
        if blocks is self.blocks:
            object.__setattr__(grown, "serial", self.serial)
        return grown

    def places(self, n):
        seen = n if self.window is None else min(n, self.window + self.slack + self.size)
        return -(-seen // self.size)

    @property
    def floor(self):
        return self.first * self.size + self.window - 1 if self.first and self.window else 0

    def cut(self, n):
        if n == 0:
            return replace(self, blocks=(), first=0, length=0)
        return replace(self, blocks=self.blocks[: -(-n // self.size) - self.first], length=n)

    def piece(self, i, size):
        at = i - self.first
        return self.blocks[at] if 0 <= at < len(self.blocks) else None

    def describe(self):
        return {"first": self.first}

    def placed(self, blocks, n, described):
        first = described["first"]
        for i, block in enumerate(blocks, first):
            block.filled = min(self.size, n - i * self.size)
        return replace(self, blocks=blocks, first=first, length=n)

    def adopt(self, pieces, n, size):
        first = 0 if self.window is None else max(0, n - self.window + 1) // self.size
        held = tuple(pieces[first : -(-n // self.size)])
        if any(b is None for b in held):
            return None
        return replace(self, blocks=held, first=first, length=n)


@dataclass(frozen=True)
class RotatingState(LayerState):
    """A window of keys and values in one place of `size` slots; after `keep` first tokens, written round and round.

    Writing on destroys the oldest tokens, so a place that two states name is never written again: it is copied.
    """

    pool: BlockPool
    size: int
    window: int
    keep: int = 0
    blocks: tuple[Block, ...] = ()
    oldest: int = 0  # tokens before this one, but the first `keep`, are overwritten
    stride: int = 32
    before_length: int = 0
    length: int = 0
    serial: int = serial()
    sparse = True

    def grow(self, n):
        blocks = self.blocks or tuple(self.pool.take())
        if blocks[0].filled != self.length:
            [new] = self.pool.take()
            self.pool.copies.append((blocks[0], new))
            blocks = (new,)
        blocks[0].filled = end = self.length + n
        oldest = max(self.oldest, end - (self.size - self.keep))
        oldest = 0 if oldest <= self.keep else oldest
        return replace(self, blocks=blocks, oldest=oldest, before_length=self.length, length=end)

    def places(self, n):
        return 1

    @property
    def floor(self):
        return self.oldest + self.window - 1 if self.oldest else 0

    def cut(self, n):
        if n == 0:
            return RotatingState(self.pool, self.size, self.window, self.keep, stride=self.stride)
        self.blocks[0].filled = SHARED
        return replace(self, length=n)

    @property
    def stops(self):
        first = max(self.before_length // self.stride + 1, -(-self.floor // self.stride)) * self.stride
        return tuple(range(first, self.length + 1, self.stride))

    def describe(self):
        return {"oldest": self.oldest}

    def placed(self, blocks, n, described):
        blocks[0].filled = SHARED  # a value that was read from a file may be continued twice, as any other
        return replace(self, blocks=blocks, oldest=described["oldest"], length=n)

    def piece(self, i, size):
        return self.cut(self.length) if i == (self.length - 1) // size else None

    def adopt(self, pieces, n, size):
        held = pieces[(n - 1) // size]
        return held.cut(n) if held is not None and held.floor <= n <= held.length else None


@dataclass(frozen=True)
class RecurrentState(LayerState):
    """A running summary. It exists at one length; growing it writes to a new place, so the old one stays a value.

    Every `stride` tokens inside a growth get a place of their own: the checkpoints a prefix can be resumed at.
    """

    pool: BlockPool
    stride: int
    blocks: tuple[Block, ...] = ()
    before: tuple[Block, ...] = ()  # where the step that made this one read from
    before_length: int = 0
    inner: tuple[tuple[int, Block], ...] = ()  # lengths passed on the way, and their places
    length: int = 0
    sparse = True

    def grow(self, n):
        end = self.length + n
        passed = range((self.length // self.stride + 1) * self.stride, end, self.stride)
        last, *places = self.pool.take(1 + len(passed))
        inner = tuple(zip(passed, places))
        return RecurrentState(self.pool, self.stride, (last,), self.blocks, self.length, inner, end)

    def places(self, n):
        return 2  # where it reads and where it writes

    @property
    def floor(self):
        return self.length

    @property
    def stops(self):
        own = (self.length,) if self.length % self.stride == 0 else ()
        return (*(n for n, _ in self.inner), *own)

    def at(self, n):
        places = dict(self.inner) | {self.length: self.blocks[0]}
        return replace(self, blocks=(places[n],), before=(), inner=(), length=n)

    def cut(self, n):
        return self.at(n) if n else RecurrentState(self.pool, self.stride)

    def placed(self, blocks, n, described):
        return replace(self, blocks=blocks, length=n)

    def piece(self, i, size):
        return self.cut(self.length) if i == (self.length - 1) // size else None

    def adopt(self, pieces, n, size):
        held = pieces[(n - 1) // size]
        return held if held is not None and held.length == n else None
