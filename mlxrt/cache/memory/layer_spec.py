"""What a model asks for, per layer, and how a step reaches it.

A layer's arrays come in two parts. The `pool` holds all sequences and is written only by steps that run alone.
`live` is the small part of the running batch that every decode step replaces. MLX keeps an array's buffer until the
step that reads it has finished, so a pool written by a step launched ahead would be copied whole, every time.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx

from ..blocks import BlockPool
from ..layer_state import LayerState
from .slices import ArrayCache

Arrays = tuple[mx.array, ...]
TAIL = 32  # decode steps between two writes of the pool: each waits for the device
TailSpan = tuple[list[int], int]  # where each row's tail begins, and how many tokens it has


class Batch(NamedTuple):
    """The rows of a step, packed end to end, those of one token first. Arrays, so that a step can be compiled."""

    positions: mx.array  # [N]
    row: mx.array  # [N] which row a token belongs to
    start: mx.array  # [R] tokens in the pool when `live` was opened
    used: mx.array  # [1] tokens a row has in `live`
    singles: int  # leading rows of one token
    spans: tuple[
        tuple[int, int, int], ...
    ] = ()  # the other rows: first token, one past the last, position of the first
    every: bool = True  # False: only each row's last hidden state is read, and a model may answer with those alone


class LayerSpec(ABC):
    """Frozen and comparable: layers with equal specs form a group."""

    max_step: int = 1 << 30  # tokens of one sequence a step may take
    paged: bool = False  # grows by blocks of `size` tokens; otherwise one place a sequence, kept every `stride` tokens
    compiles: bool = True  # its steps are functions of arrays alone
    pages: bool = False  # kernels for paged attention can read it
    portable: bool = True  # its places can be read out and written elsewhere
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
        """One layer's memory for all sequences."""

    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of one block of one layer."""

    @abstractmethod
    def index(
        self,
        states: list[Any],
        rows: int,
        alone: bool = False,
        compiled: bool = False,
        held: ArrayCache | None = None,
        tail: TailSpan | None = None,
    ) -> dict[str, Any]:
        """Where the rows' memory lies, made once per group and step; `rows` >= len(states), the rest idle.

        A step that runs `alone` may get plain numbers as well; a `compiled` one needs shapes that change seldom;
        `held` remembers the arrays of the steps before; `tail` is given where rows decode on.
        """

    @abstractmethod
    def open(self, pool: Arrays, index: dict[str, mx.array], rows: int, held: ArrayCache) -> Arrays:
        """`live` for a batch that begins to decode."""

    @abstractmethod
    def flush(self, pool: Arrays, live: Arrays, batch: Batch, index: dict[str, mx.array], whole: bool) -> Arrays:
        """The pool with `live` written into it; `whole`: it is a block of every row, if blocks have TAIL tokens."""

    def place(self, state: Any, position: int) -> int:
        """The block that holds a position, where there are `pages`."""
        raise TypeError(f"{type(self).__name__} has no pages")

    @abstractmethod
    def view(self, batch: Batch, index: dict[str, mx.array], pool: Arrays, live: Arrays) -> "LayerView": ...


@dataclass
class LayerView:
    """A layer's memory for the step that is running. Models see only this."""

    spec: Any
    batch: Batch
    index: dict[str, mx.array]
    pool: Arrays
    live: Arrays  # () in a step that runs alone: it writes the pool itself
    scratch: dict = field(default_factory=dict)  # what a kind remembers within the step

    @property
    def positions(self) -> mx.array:
        return self.batch.positions


@dataclass(frozen=True)
class Shared:
    """A layer without memory of its own: it reads what `layer` holds. It calls attend(q) with no k and v."""

    layer: int

    @property
    def signature(self) -> str:
        return f"Shared(layer={self.layer})"


class Group(NamedTuple):
    spec: LayerSpec
    layers: tuple[int, ...]
    pool: BlockPool

    def nbytes(self, places: int) -> int:
        return places * len(self.layers) * self.spec.nbytes()
