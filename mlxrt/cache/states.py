"""What one sequence holds in one group of layers: immutable, a few integers, no arrays.

Layers that ask for the same memory form a group and share one state, so the work on the host does not grow with
the depth of the model.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from ..errors import CannotRewind
from .blocks import Block, BlockPool


class LayerState(ABC):
    length: int
    blocks: tuple[Block, ...]

    @abstractmethod
    def grow(self, n: int) -> Self:
        """Room for n more tokens. Raises NoRoom and leaves everything as it was."""

    @property
    @abstractmethod
    def floor(self) -> int:
        """The state can be cut back to any length from here up to its own, and to 0."""

    @abstractmethod
    def cut(self, n: int) -> Self:
        """The state at n tokens; `rewind` has checked that it exists."""

    @abstractmethod
    def piece(self, i: int) -> Block | None:
        """What it holds of the i-th node of tokens, for the prefix store; None where it holds nothing."""

    @abstractmethod
    def adopt(self, pieces: Sequence[Block | None], n: int) -> Self | None:
        """The state of n tokens made of stored pieces, or None where they do not suffice."""

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

    def grow(self, n):
        out = 0 if self.window is None else max(self.first, (self.length - self.window - self.slack + 1) // self.size)
        blocks, end, at = list(self.blocks[out - self.first :]), self.length + n, self.length % self.size
        shared = bool(at) and blocks[-1].filled != at  # somebody else wrote on in the last block
        new = self.pool.take(-(-end // self.size) - out - len(blocks) + shared)
        if shared:
            self.pool.copies.append((blocks.pop(), new[0]))
        blocks += new
        for i in range(self.length // self.size, -(-end // self.size)):
            blocks[i - out].filled = min(self.size, end - i * self.size)
        return replace(self, blocks=tuple(blocks), first=out, length=end)

    @property
    def floor(self):
        return self.first * self.size + self.window - 1 if self.first else 0

    def cut(self, n):
        if n == 0:
            return replace(self, blocks=(), first=0, length=0)
        return replace(self, blocks=self.blocks[: -(-n // self.size) - self.first], length=n)

    def piece(self, i):
        at = i - self.first
        return self.blocks[at] if 0 <= at < len(self.blocks) else None

    def adopt(self, pieces, n):
        first = 0 if self.window is None else max(0, n - self.window + 1) // self.size
        held = tuple(pieces[first : -(-n // self.size)])
        if any(b is None for b in held):
            return None
        return replace(self, blocks=held, first=first, length=n)
