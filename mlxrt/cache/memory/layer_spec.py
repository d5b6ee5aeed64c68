"""Cache specs: the kind of cache a model asks for in each layer, and the view through which a step uses it.

A layer's arrays come in two parts. The `pool` holds all sequences and is written only by prefill steps and flushes,
which run alone. `live` is the small part of the running batch that every decode step replaces. MLX keeps a buffer until
the step that reads it has finished, so a pool written by a decode step launched ahead would be copied, every time.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx

from ..blocks import BlockPool
from ..layer_state import LayerState
from .slices import ArrayCache

Arrays = tuple[mx.array, ...]
TAIL = 32  # decode steps between two flushes to the pool: each waits for the device, except in CUDA graphs


class TailSpan(NamedTuple):
    """The decode tail of a batch; idle rows begin at 0."""

    starts: list[int]  # the position where each row's tail begins
    used: int  # tokens that it has
    size: int  # and will have when it is flushed


class Batch(NamedTuple):
    """The rows of a step, packed end to end, rows of one token first. Arrays, so that a step can be compiled."""

    positions: mx.array  # [N]
    row: mx.array  # [N] which row a token belongs to
    start: mx.array  # [R] tokens in the pool when decoding began
    used: mx.array  # [1] tokens a row has in `live`
    singles: int  # leading rows of one token
    spans: tuple[tuple[int, int, int], ...] = ()  # prefill chunks: first token, one past the last, first position
    every: bool = True  # False: only each row's last hidden state is read, and a model may return those alone


class TailPiece(NamedTuple):
    """Tokens of a row's tail that go to one block. A recurrent layer's state is one token of a block of one."""

    first: int  # in the tail
    block: int
    slot: int  # of the first in the block
    tokens: int


class LayerSpec(ABC):
    """Frozen and comparable: layers with equal specs form a group."""

    paged: bool = False  # grows by blocks of `size` tokens; else one block per sequence, a checkpoint every `stride`
    compiles: bool = True  # its steps are pure functions of arrays
    pages: bool = False  # paged attention kernels can read it
    recurrent: bool = False  # `live` is a state that goes on from tail to tail; else every tail begins empty
    portable: bool = True  # its blocks can be saved and loaded
    size: int
    stride: int

    @property
    @abstractmethod
    def signature(self) -> str:
        """The spec as text in the identity of saved states. A file format: names in it outlive those in the code."""

    @abstractmethod
    def empty(self, pool: BlockPool) -> LayerState: ...

    @abstractmethod
    def pool(self, blocks: int) -> Arrays:
        """One layer's arrays for all sequences, by block."""

    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of one block of one layer."""

    def gathered_bytes(self, context: int, tokens: int) -> int:
        """Of one layer, that a step with so many tokens of a prompt reads together, whose end is at `context`."""
        return 0

    @abstractmethod
    def index(
        self,
        states: list[Any],
        rows: int,
        prefill: bool = False,
        compiled: bool = False,
        arrays: ArrayCache | None = None,
        tail: TailSpan | None = None,
    ) -> dict[str, Any]:
        """Block tables and offsets of the rows, built once per group and step. Rows beyond the states are idle.

        A `prefill` step may get Python ints as well; a `compiled` one needs shapes that change seldom; `arrays` has
        those of earlier steps; `tail` is given in decode steps.
        """

    @abstractmethod
    def open_live(self, pool: Arrays, index: dict[str, mx.array], rows: int, arrays: ArrayCache) -> Arrays:
        """`live` of a batch that begins to decode."""

    def open_prefill(self, pool: Arrays, index: dict[str, Any]) -> Arrays:
        """`live` of a prefill step: what it reads of the pool before it writes there. It is evaluated before the step
        is launched, for MLX copies a pool that still has a reader."""
        return ()

    @abstractmethod
    def flush(self, pool: Arrays, live: Arrays, batch: Batch, index: dict[str, mx.array], full: bool) -> Arrays:
        """The pool with `live` written into it; `full`: the tail has TAIL tokens and begins at a block boundary."""

    def tail_pieces(self, state: Any, start: int, count: int) -> list[TailPiece]:
        """Where a row's tail goes, which begins at a position; only where `pages` or `recurrent` is true."""
        raise TypeError(f"{type(self).__name__} has no such blocks")

    @abstractmethod
    def view(self, batch: Batch, index: dict[str, mx.array], pool: Arrays, live: Arrays) -> "LayerView": ...


@dataclass
class LayerView:
    """A layer's cache during one step. Models see only this."""

    spec: Any
    batch: Batch
    index: dict[str, mx.array]
    pool: Arrays
    live: Arrays  # in a prefill step, which writes the pool itself, what `open_prefill` read
    scratch: dict = field(default_factory=dict)  # private to the kind, for this step
    on_write: Callable[[], None] | None = None  # called when a prefill step has written the pool

    @property
    def positions(self) -> mx.array:
        return self.batch.positions

    def release(self) -> None:
        """Forget what only layers that share this cache could still read."""

    def finite(self) -> mx.array | None:
        """[N] whether what the step stored of each token is finite; None: ask the hidden states.

        In the last layer with a cache this says it of all layers before: a NaN stays in the residual. Layers after it
        are then not computed at all where a chunk of a prompt samples nothing: 20 of 35 in Gemma 4 E2B.
        """
        return None


@dataclass(frozen=True)
class Shared:
    """A layer without a cache of its own: it attends to the keys and values of another layer."""

    layer: int

    @property
    def signature(self) -> str:
        return f"Shared(layer={self.layer})"


class Group(NamedTuple):
    """Layers with equal specs: one BlockPool and one LayerState per sequence serve them all."""

    spec: LayerSpec
    layers: tuple[int, ...]
    pool: BlockPool

    def nbytes(self, blocks: int) -> int:
        return blocks * len(self.layers) * self.spec.nbytes()
