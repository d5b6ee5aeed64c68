"""Pool sizing: which layers form a group, and how many blocks each group gets from a byte budget."""

from dataclasses import dataclass
from math import ceil

from ...errors import WontFit
from ..blocks import BlockPool
from .layer_spec import Group, LayerSpec, Shared
from .paged import RotatingKV

FIRST_BLOCKS = 33  # a pool starts with these (one is the dummy) and doubles: short chats stay small
SPARE_BLOCKS = 2  # a sequence that shares its last block copies it to grow
UNLIMITED = 1 << 30  # tokens: more than any model's context
CHECKPOINT_SHARE = 0.25  # of the budget, for layers with one block per sequence


@dataclass(frozen=True)
class PoolSizes:
    groups: list[Group]
    node: int  # tokens per node of the prefix cache
    fits: int  # tokens of one sequence that fit


def size_pools(specs: list[LayerSpec | Shared], budget: int, running: int, chunk: int) -> PoolSizes:
    """For up to `running` sequences, computed in steps of up to `chunk` tokens. Where the user bounds their KV cache
    (`RotatingKV`), the pool is bounded with it: cached prefixes get no more than what running sequences would take."""
    by: dict[LayerSpec, list[int]] = {}
    for i, spec in enumerate(specs):
        if not isinstance(spec, Shared):
            by.setdefault(spec, []).append(i)
    cost = {spec: len(layers) * spec.nbytes() for spec, layers in by.items()}  # of one block
    paged = [spec for spec in by if spec.paged]
    single = [spec for spec in by if not spec.paged]  # one block per sequence
    share = int(budget * (CHECKPOINT_SHARE if paged else 1)) if single else 0
    limits = {spec: 1 + min(share // sum(cost[s] for s in single), 64 * running) for spec in single}
    limits |= {spec: 1 + (budget - share) // sum(cost[p] for p in paged) for spec in paged}
    held = {spec: spec.empty(BlockPool(1)).num_blocks(UNLIMITED, chunk) for spec in paged}  # by the longest sequence
    limits |= {s: min(limits[s], 1 + SPARE_BLOCKS + running * held[s]) for s in paged if isinstance(s, RotatingKV)}
    if any(n < 2 + SPARE_BLOCKS for n in limits.values()):
        least = smallest_budget(sum(cost[s] for s in single), sum(cost[s] for s in paged))
        raise WontFit(
            f"keys, values and states need {least} bytes at least, there are {budget}; "
            "use a smaller model or raise kv_memory"
        )
    sizes = {spec.size for spec in paged}
    if len(sizes) > 1:
        raise WontFit(f"layers ask for blocks of {sorted(sizes)} tokens; a model must use one size")
    node = sizes.pop() if sizes else min(spec.stride for spec in single)
    if odd := [spec.stride for spec in single if spec.stride % node]:
        raise WontFit(f"a checkpoint every {odd[0]} tokens does not fall on the ends of blocks of {node}")
    first = {spec: min(FIRST_BLOCKS if spec.paged else 2 + SPARE_BLOCKS, limit) for spec, limit in limits.items()}
    groups = [Group(spec, tuple(layers), BlockPool(first[spec], limits[spec])) for spec, layers in by.items()]
    usable = {spec: limits[spec] - 1 - SPARE_BLOCKS for spec in paged}
    fits = min((n * node for spec, n in usable.items() if n < held[spec]), default=UNLIMITED)
    return PoolSizes(groups, node, fits)


def smallest_budget(single: int, paged: int) -> int:
    """Bytes from which on every group gets the blocks one sequence needs. Given: what a block costs in each kind."""
    least = 1 + SPARE_BLOCKS
    if not (single and paged):
        return least * (single + paged)
    return ceil(max(least * single / CHECKPOINT_SHARE, least * paged / (1 - CHECKPOINT_SHARE)))
