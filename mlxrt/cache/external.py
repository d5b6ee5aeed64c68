"""External caches: a sequence inside a cache object of another library, one object for all layers, written in place.

Blocks only account for what such an object costs, so that budgets, eviction and preemption need no special case. The
holder of a slot's only reference may append to it; any other copies it first. No arrays, no mlx.
"""

from dataclasses import dataclass, replace
from weakref import WeakSet

from ..errors import BadSnapshot, CacheCorrupt
from .blocks import Block, BlockPool
from .layer_state import LayerState

NO_LIMIT = 1 << 62  # a limit no sequence reaches


class Slot:
    """Stands for one cache object, with the blocks that account for it. Freed with its last reference."""

    __slots__ = ("__weakref__", "blocks", "length", "refs")

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.refs: WeakSet[Ref] = WeakSet()
        self.length = 0  # tokens in it, those of the next step included


class Ref:
    """One state's reference to a slot."""

    __slots__ = ("__weakref__", "slot")

    def __init__(self, slot: Slot):
        self.slot = slot
        slot.refs.add(self)


@dataclass(frozen=True)
class ExternalState(LayerState):
    """Tokens in a slot. While the slot holds fewer than `limit`, trimming tokens off its end is exact."""

    pool: BlockPool
    size: int  # tokens per accounted block; 0 where a cache does not grow with its tokens
    base: int = 1  # blocks a cache costs before its first token
    limit: int = NO_LIMIT
    stride: int = 512  # tokens between two checkpoints where nothing can be trimmed: each one is a copy
    ref: Ref | None = None
    source: Ref | None = None  # what the step that made this state reads from
    start: int = 0  # and how many tokens of it
    length: int = 0
    has_checkpoints = True

    @property
    def blocks(self) -> tuple[Block, ...]:  # type: ignore[override]
        return tuple(self.ref.slot.blocks) if self.ref else ()

    def grow(self, n, checkpoints=True):
        old, end = self.ref.slot if self.ref is not None else None, self.length + n
        if old is not None and old.length != self.length and old.length >= self.limit:
            raise CacheCorrupt(f"a cache of {old.length} tokens that cannot be cut is asked for {self.length}")
        slot = old if old is not None and len(old.refs) == 1 else Slot()
        slot.blocks += self.pool.allocate(max(0, self.num_blocks(end) - len(slot.blocks)))
        slot.length = end
        ref = self.ref if slot is old else Ref(slot)
        return replace(self, ref=ref, source=self.ref, start=self.length, length=end)

    def after_step(self):
        return replace(self, source=self.ref)  # not None: a state of a running sequence is not the cache's to keep

    def num_blocks(self, n, step=1):
        return self.base + (-(-n // self.size) if self.size else 0)

    @property
    def floor(self):
        return 0 if self.ref is None or self.ref.slot.length < self.limit else self.length

    def truncate(self, n):
        ref = Ref(self.ref.slot) if n and self.ref is not None else None
        return replace(self, ref=ref, source=None, start=0, length=n)

    @property
    def checkpoints(self):
        return (self.length,) if self.floor and self.length % self.stride == 0 else ()

    def block_for(self, i, size):
        if self.floor and i != (self.length - 1) // size:
            return None
        return self if self.source is None else self.truncate(self.length)

    def restore(self, blocks, n, metadata):
        raise BadSnapshot("the memory of a model that runs through mlx-lm cannot be restored from a file")
