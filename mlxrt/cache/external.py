"""A sequence inside a cache object of another library: one object holds all layers, and is written in place.

Blocks are only what such an object costs, so that budgets, eviction and preemption need no special case. Who may write
on is decided by claims: the holder of a place's only claim may, anybody else copies first. No arrays, no mlx.
"""

from dataclasses import dataclass, replace
from weakref import WeakSet

from ..errors import BadSnapshot, CacheCorrupt
from .blocks import Block, BlockPool
from .layer_state import LayerState

ANY = 1 << 62  # a limit no sequence reaches


class Slot:
    """Where one cache object lies, and the blocks that pay for it. It goes when the last claim on it goes."""

    __slots__ = ("__weakref__", "blocks", "claims", "held")

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.claims: WeakSet[Ref] = WeakSet()
        self.held = 0  # tokens in it, promised ones included


class Ref:
    """One holder's interest in a place."""

    __slots__ = ("__weakref__", "place")

    def __init__(self, place: Slot):
        self.place = place
        place.claims.add(self)


@dataclass(frozen=True)
class ExternalState(LayerState):
    """Tokens in a place. While the place holds fewer than `limit`, cutting tokens off its end is exact."""

    pool: BlockPool
    size: int  # tokens a block pays for; 0 where a cache does not grow with its tokens
    base: int = 1  # blocks a cache costs before its first token
    limit: int = ANY
    stride: int = 512  # tokens between two checkpoints where nothing can be cut off: each one is a copy
    claim: Ref | None = None
    source: Ref | None = None  # what the step that made this state reads from
    start: int = 0  # and how many tokens of it
    length: int = 0
    sparse = True

    @property
    def blocks(self) -> tuple[Block, ...]:  # type: ignore[override]
        return tuple(self.claim.place.blocks) if self.claim else ()

    def cost(self, n: int) -> int:
        return self.base + (-(-n // self.size) if self.size else 0)

    def grow(self, n):
        old, end = self.claim.place if self.claim is not None else None, self.length + n
        if old is not None and old.held != self.length and old.held >= self.limit:
            raise CacheCorrupt(
                f"a cache of {old.held} tokens, none of which can be cut off, is asked for {self.length}"
            )
        place = old if old is not None and len(old.claims) == 1 else Slot()
        place.blocks += self.pool.take(max(0, self.cost(end) - len(place.blocks)))
        place.held = end
        claim = self.claim if place is old else Ref(place)
        return replace(self, claim=claim, source=self.claim, start=self.length, length=end)

    def places(self, n):
        return self.cost(n)

    @property
    def floor(self):
        return 0 if self.claim is None or self.claim.place.held < self.limit else self.length

    def cut(self, n):
        claim = Ref(self.claim.place) if n and self.claim is not None else None
        return replace(self, claim=claim, source=None, start=0, length=n)

    @property
    def stops(self):
        return (self.length,) if self.floor and self.length % self.stride == 0 else ()

    def piece(self, i, size):
        if self.floor and i != (self.length - 1) // size:
            return None
        return self if self.source is None else self.cut(self.length)

    def adopt(self, pieces, n, size):
        held = pieces[(n - 1) // size]
        return held.cut(n) if held is not None and held.floor <= n <= held.length else None

    def placed(self, blocks, n, described):
        raise BadSnapshot("the memory of a model that runs through mlx-lm cannot be restored from a file")
