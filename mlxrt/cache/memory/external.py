"""The memory of a model that another library computes: its own cache objects, one per sequence, kept by place.

Rows of a step run one after another, each on its own object, so a row never sees another's padding. Nothing here knows
whose objects they are: making one and cutting its end off are functions that are given.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import mlx.core as mx
from mlx.utils import tree_flatten

from ...errors import CacheCorrupt
from ..external import NO_LIMIT, ExternalState, Slot
from .layer_spec import LayerSpec, LayerView

Cache = list[Any]  # one object per layer
Shelf = WeakKeyDictionary[Slot, tuple[Cache, int]]  # a cache and the tokens in it; gone when nobody claims the place


class ExternalView(LayerView):
    """All layers of the model at once."""

    def run(self, call: Callable[[mx.array, Cache], mx.array], tokens: mx.array) -> mx.array:
        """call(tokens [1, n], cache) -> logits [1, n, V], for every row; [N, V], or one row each: the last token's."""
        rows, s = self.index["rows"], self.batch.singles
        bounds = [(i, i + 1) for i in range(min(s, len(rows)))] + [(a, b) for a, b, _ in self.batch.spans]
        out = []
        for (a, b), (source, place, start) in zip(bounds, rows, strict=True):
            cache = self.spec.opened(source, place, start, b - a)
            if b - a > 1 and not self.batch.every:  # their logits are never computed, as nobody asks for them
                call(tokens[None, a : b - 1], cache)
                mx.async_eval(arrays_of(cache))
                a = b - 1
            out.append(call(tokens[None, a:b], cache)[0])
            mx.async_eval(arrays_of(cache))
        return mx.concatenate(out) if len(out) > 1 else out[0]


def arrays_of(cache: Cache) -> list[mx.array]:
    flat: Any = tree_flatten([c.state for c in cache])
    return [leaf for _, leaf in flat if isinstance(leaf, mx.array)]


@dataclass(frozen=True, eq=False)
class ExternalKV(LayerSpec):
    unit: int  # bytes of one block: of `size` tokens in all layers, or of a whole cache that does not grow
    base: int  # blocks a cache costs before its first token
    grows: bool
    limit: int  # cutting tokens off is exact while a cache holds fewer
    make: Callable[[], Cache] = field(repr=False)
    trim: Callable[[Cache, int], int] = field(repr=False)  # cuts so many tokens off; answers how many it did
    size: int = 32
    stride: int = 512
    shelf: Shelf = field(default_factory=WeakKeyDictionary, repr=False)
    window = None  # where layers have one, it is the module's own business
    paged = True
    compiles = False
    portable = False

    @property
    def signature(self):
        return repr(self)  # never in a file: it is not portable

    def empty(self, pool):
        return ExternalState(pool, self.size if self.grows else 0, self.base, self.limit, self.stride)

    def pool(self, blocks):
        """A byte a block: what is in them lies on the shelf."""
        return (mx.zeros((blocks, 1), mx.uint8),)

    def nbytes(self):
        return self.unit

    @property
    def rewinds(self) -> bool:
        """Whether tokens can be cut off at any length."""
        return self.limit == NO_LIMIT

    @property
    def reuse(self) -> str:
        """Which prefixes can be taken up again."""
        if self.rewinds:
            return "any stored prefix"
        exact = f"where a request ended, and every {self.stride} tokens"
        return f"any stored prefix of a text shorter than {self.limit} tokens, else {exact}" if self.limit else exact

    def index(self, states, rows, alone=False, compiled=False, held=None, tail=None):
        return {"rows": [(s.source and s.source.slot, s.ref.slot, s.start) for s in states]}

    def open(self, pool, index, rows, held):
        return ()

    def flush(self, pool, live, batch, index, whole):
        return pool

    def view(self, batch, index, pool, live):
        return ExternalView(self, batch, index, pool, live)

    def opened(self, source: Slot | None, place: Slot, start: int, n: int) -> Cache:
        """The cache of a row with `start` tokens in it, ready to take n more."""
        cache, held = (self.make(), 0) if source is None else self.shelf[source]
        if source is not None and source is not place:
            cache = copy.deepcopy(cache)
        if held < start or (held > start and self.trim(cache, held - start) != held - start):
            raise CacheCorrupt(f"a cache holds {held} tokens and {start} are wanted")
        self.shelf[place] = cache, start + n
        return cache
