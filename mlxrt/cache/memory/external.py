"""External caches: cache objects of another library (mlx-lm), one per sequence, for models that library computes.

Rows of a step run one after another, each on its own object, so a row never sees another's padding. The library itself
is not imported here: callers pass in the functions that make and trim a cache.
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
Caches = WeakKeyDictionary[Slot, tuple[Cache, int]]  # a cache and its number of tokens; freed with the slot


class ExternalView(LayerView):
    """All layers of the model at once."""

    def run(self, call: Callable[[mx.array, Cache], mx.array], tokens: mx.array) -> mx.array:
        """Run call(tokens [1, n], cache) -> logits [1, n, V] for every row; [N, V], or only each row's last: [R, V]."""
        rows, s = self.index["rows"], self.batch.singles
        bounds = [(i, i + 1) for i in range(min(s, len(rows)))] + [(a, b) for a, b, _ in self.batch.spans]
        out = []
        for (a, b), (source, slot, start) in zip(bounds, rows, strict=True):
            cache = self.spec.open_cache(source, slot, start, b - a)
            if b - a > 1 and not self.batch.every:  # the logits of all but the last token are never evaluated
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
    unit: int  # bytes of one block: of `size` tokens in all layers, or of an entire cache that does not grow
    base: int  # blocks a cache costs before its first token
    grows: bool
    limit: int  # trimming is exact while a cache holds fewer tokens
    make: Callable[[], Cache] = field(repr=False)
    trim: Callable[[Cache, int], int] = field(repr=False)  # trims n tokens; returns how many it trimmed
    size: int = 32
    stride: int = 512
    caches: Caches = field(default_factory=WeakKeyDictionary, repr=False)
    window = None  # the model's own caches apply it
    paged = True
    compiles = False
    portable = False

    @property
    def signature(self):
        return repr(self)  # never in a file: it is not portable

    def empty(self, pool):
        return ExternalState(pool, self.size if self.grows else 0, self.base, self.limit, self.stride)

    def pool(self, blocks):
        """One byte per block: the data is in `caches`."""
        return (mx.zeros((blocks, 1), mx.uint8),)

    def nbytes(self):
        return self.unit

    @property
    def rewinds(self) -> bool:
        """Whether tokens can be trimmed at any length."""
        return self.limit == NO_LIMIT

    @property
    def reuse(self) -> str:
        """Which prefixes can be reused, in words."""
        if self.rewinds:
            return "any stored prefix"
        exact = f"where a request ended, and every {self.stride} tokens"
        return f"any stored prefix of a text shorter than {self.limit} tokens, else {exact}" if self.limit else exact

    def index(self, states, rows, prefill=False, compiled=False, arrays=None, tail=None):
        return {"rows": [(s.source and s.source.slot, s.ref.slot, s.start) for s in states]}

    def open_live(self, pool, index, rows, arrays):
        return ()

    def flush(self, pool, live, batch, index, full):
        return pool

    def view(self, batch, index, pool, live):
        return ExternalView(self, batch, index, pool, live)

    def open_cache(self, source: Slot | None, slot: Slot, start: int, n: int) -> Cache:
        """The cache of a row with `start` tokens in it, for a step of n more."""
        cache, length = (self.make(), 0) if source is None else self.caches[source]
        if source is not None and source is not slot:
            cache = copy.deepcopy(cache)
        if length < start or (length > start and self.trim(cache, length - start) != length - start):
            raise CacheCorrupt(f"a cache holds {length} tokens and {start} are wanted")
        self.caches[slot] = cache, start + n
        return cache
