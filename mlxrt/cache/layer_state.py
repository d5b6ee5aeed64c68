"""Layer states: what a sequence holds in the KV cache of one group of layers. Immutable, a few integers, no arrays.

Layers with equal cache specs form a group and share one state, so host work does not grow with the model's depth. A
`SequenceState` is the layer states of a sequence and the tokens they hold.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Self

from ..errors import CacheCorrupt, CannotRewind
from .blocks import Block, BlockPool

SERIALS = count()


def serial() -> int:
    """A field that is new in every new state; only `BlockTable.grow` carries it over, when the blocks stay."""
    return field(default_factory=SERIALS.__next__, init=False, compare=False)


class LayerState(ABC):
    pool: BlockPool
    length: int
    blocks: tuple[Block, ...]
    serial: int  # equal in states with the same blocks: a key that does not keep blocks alive
    first = 0  # blocks released at the front
    has_checkpoints = False  # exists at some lengths only: prefixes are reused at checkpoints

    @abstractmethod
    def grow(self, n: int, checkpoints: bool = True) -> Self:
        """A state with blocks for n more tokens; with `checkpoints`, blocks for those within the growth too.

        Raises NoRoom and changes nothing.
        """

    def after_step(self) -> Self:
        """The same state without what only the step that made it needed. That step must be launched."""
        return self

    @abstractmethod
    def num_blocks(self, n: int, step: int = 1) -> int:
        """The most blocks a sequence of n tokens holds at once, computed in steps of up to `step` tokens.

        Of a state nobody else names: one that shares its last block needs one more to copy it.
        """

    @property
    @abstractmethod
    def floor(self) -> int:
        """The state can be rewound to any length from here up to its own, and to 0."""

    @abstractmethod
    def truncate(self, n: int) -> Self:
        """The state at n tokens; `rewind` has checked n."""

    def block_for(self, i: int, size: int) -> Any:
        """What the prefix cache keeps for the i-th node of `size` tokens: a block, a checkpoint, or None."""
        return self.truncate(self.length) if i == (self.length - 1) // size else None

    def from_blocks(self, blocks: Sequence[Any], n: int, size: int) -> Self | None:
        """The state of n tokens made of what `block_for` gave for each node; None where some are missing."""
        checkpoint = blocks[(n - 1) // size]
        usable = checkpoint is not None and checkpoint.floor <= n <= checkpoint.length
        return checkpoint.truncate(n) if usable else None

    def describe(self) -> dict[str, int]:
        """What `restore` needs beside the blocks, for files."""
        return {}

    @abstractmethod
    def restore(self, blocks: tuple[Block, ...], n: int, metadata: dict[str, int]) -> Self:
        """From an empty state, the one with n tokens in these newly allocated blocks."""

    def restore_node(self, block: Block, i: int, n: int, metadata: dict[str, int], size: int) -> Any:
        """From an empty state, what `block_for` gave for the i-th node, which ends with n tokens, in a new block."""
        return self.restore((block,), n, metadata).block_for(i, size)

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """Lengths within the last `grow` at which a state that has checkpoints exists too."""
        return ()

    def checkpoint_at(self, n: int) -> Self:
        """The state at one of the checkpoints of its sequence's last step, or at its own length."""
        return self.truncate(n)

    def resume_point(self, limit: int) -> int:
        """The largest n <= limit this state can be rewound to."""
        n = min(limit, self.length)
        return n if n >= self.floor else 0

    def rewind(self, n: int) -> Self:
        if n < 0 or self.resume_point(n) != n:
            name = type(self).__name__
            raise CannotRewind(f"{name} can be cut to {self.floor}..{self.length} tokens or 0, not to {n}")
        return self.truncate(n)


@dataclass(frozen=True)
class BlockTable(LayerState):
    """Block table: KV in blocks of `size` tokens. With a window, blocks that fell out of it are released, but for those
    of the first `keep` tokens, which stay at the front.

    `slack` tokens beyond the window stay: the decode tail is flushed late and must still find its block, and short
    rewinds stay exact without the prefix cache.
    """

    pool: BlockPool
    size: int
    window: int | None = None
    slack: int = 0
    keep: int = 0
    blocks: tuple[Block, ...] = ()
    first: int = 0  # blocks released, after the kept ones
    length: int = 0
    serial: int = serial()

    @property
    def kept(self) -> int:
        """Blocks that are never released."""
        return -(-self.keep // self.size)

    def first_visible(self, n: int) -> int:
        """The first block that a token after n others sees, but for the kept ones."""
        return 0 if self.window is None else max(0, n - self.window + 1) // self.size

    def grow(self, n, checkpoints=True):
        out, blocks = self.first, self.blocks
        if self.window is not None:
            out = max(out, (self.length - self.window - self.slack + 1) // self.size - self.kept)
            if out > self.first:
                blocks = (*blocks[: self.kept], *blocks[self.kept + out - self.first :])
        end, at = self.length + n, self.length % self.size
        shared = bool(at) and blocks[-1].filled != at  # another sequence has appended to the last block
        needed = -(-end // self.size) - out - len(blocks) + shared
        if needed:  # else the same tuple is kept, so that a decode step does not visit every block of a long text
            new = self.pool.allocate(needed)
            if shared:
                self.pool.copies.append((blocks[-1], new[0]))
            blocks = (*blocks[: len(blocks) - shared], *new)
        for i in range(self.length // self.size, -(-end // self.size)):
            blocks[i - out].filled = min(self.size, end - i * self.size)
        # Not `replace`, which takes as long as all of the above: this runs for every sequence in every step.
        grown = BlockTable(self.pool, self.size, self.window, self.slack, self.keep, blocks, out, end)
        if blocks is self.blocks:
            object.__setattr__(grown, "serial", self.serial)
        return grown

    def num_blocks(self, n, step=1):
        if self.window is None:
            return -(-n // self.size)
        # A growth allocates before it releases what fell out of the window since the growth before it.
        held = self.kept * self.size + self.window + self.slack + 2 * step + self.size - 2
        return -(-min(n, held) // self.size)

    @property
    def floor(self):
        return (self.kept + self.first) * self.size + self.window - 1 if self.first and self.window else 0

    def truncate(self, n):
        if n == 0:
            return replace(self, blocks=(), first=0, length=0)
        return replace(self, blocks=self.blocks[: -(-n // self.size) - self.first], length=n)

    def block_for(self, i, size):
        at = i if i < self.kept else i - self.first
        released = at < self.kept <= i
        return None if released or at >= len(self.blocks) else self.blocks[at]

    def describe(self):
        return {"first": self.first}

    def restore(self, blocks, n, metadata):
        first = metadata["first"]
        for at, block in enumerate(blocks):
            i = at if at < self.kept else at + first
            block.filled = min(self.size, n - i * self.size)
        return replace(self, blocks=blocks, first=first, length=n)

    def restore_node(self, block, i, n, metadata, size):
        block.filled = min(self.size, n - i * self.size)
        return block

    def from_blocks(self, blocks, n, size):
        every, first = blocks[: -(-n // self.size)], max(0, self.first_visible(n) - self.kept)
        own = (*every[: self.kept], *every[self.kept + first :])
        if any(block is None for block in own):
            return None
        return replace(self, blocks=own, first=first, length=n)


@dataclass(frozen=True)
class RecurrentState(LayerState):
    """Recurrent state (linear attention, SSM, convolution). Exists at one length; `grow` writes to a new block.

    Every `stride` tokens within a `grow` get a block of their own: the checkpoints a prefix can be resumed at.
    """

    pool: BlockPool
    stride: int
    blocks: tuple[Block, ...] = ()
    before: tuple[Block, ...] = ()  # what the step that made this state read
    before_length: int = 0
    inner: tuple[tuple[int, Block], ...] = ()  # checkpoints within the last growth: length, block
    length: int = 0
    has_checkpoints = True

    def grow(self, n, checkpoints=True):
        end = self.length + n
        lengths = range((self.length // self.stride + 1) * self.stride, end if checkpoints else 0, self.stride)
        last, *blocks = self.pool.allocate(1 + len(lengths))
        inner = tuple(zip(lengths, blocks))
        return RecurrentState(self.pool, self.stride, (last,), self.blocks, self.length, inner, end)

    def after_step(self):
        return RecurrentState(self.pool, self.stride, self.blocks, length=self.length)

    def num_blocks(self, n, step=1):
        return 2  # the one a step reads and the one it writes; checkpoints are made where there is room

    @property
    def floor(self):
        return self.length

    @property
    def checkpoints(self):
        own = (self.length,) if self.length % self.stride == 0 else ()
        return (*(n for n, _ in self.inner), *own)

    def checkpoint_at(self, n):
        by_length = dict(self.inner) | {self.length: self.blocks[0]}
        return replace(self, blocks=(by_length[n],), before=(), inner=(), length=n)

    def truncate(self, n):
        return self.checkpoint_at(n) if n else RecurrentState(self.pool, self.stride)

    def restore(self, blocks, n, metadata):
        return replace(self, blocks=blocks, length=n)


class SequenceState:
    """A sequence's tokens and layer states (`parts`, one per group), which change together or not at all."""

    def __init__(self, tokens: tuple[int, ...], parts: tuple[LayerState, ...]):
        for i, part in enumerate(parts):
            if part.length != len(tokens):
                raise CacheCorrupt(f"group {i} holds {part.length} tokens, the sequence {len(tokens)}")
        self.tokens, self.parts = tokens, parts

    @classmethod
    def fit(cls, tokens: tuple[int, ...], parts: tuple[LayerState, ...]) -> "SequenceState":
        """From parts that may hold more than the tokens: the longest state that both have."""
        n = min(len(tokens), *(part.length for part in parts))
        n = n if n >= max(part.floor for part in parts) else 0
        return cls(tokens[:n], tuple(part.rewind(n) for part in parts))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def floor(self) -> int:
        return max(part.floor for part in self.parts)

    def rewind(self, n: int) -> "SequenceState":
        return SequenceState(self.tokens[:n], tuple(part.rewind(n) for part in self.parts))
