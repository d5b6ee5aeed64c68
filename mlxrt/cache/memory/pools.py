"""KV pools: the device arrays that hold the KV cache and the recurrent states of all sequences, layer by layer.

Block ids come from the host's `BlockPool`s, which only promise growth and copies; `apply_pending` carries them out.
Nothing here knows the decode tail: a caller that reads or writes blocks flushes the tail first.
"""

import logging
from collections.abc import Callable
from functools import partial

import mlx.core as mx

from ...errors import BadSnapshot
from ...kernels import device
from ..layer_state import LayerState, SequenceState
from .layer_spec import Arrays, Group
from .slices import extend, update

log = logging.getLogger("mlxrt")


class KVPools:
    """`reserve`: bytes of the device that growth must leave free for a step, where a sequence may have so many
    tokens."""

    def __init__(self, groups: list[Group], reserve: Callable[[int], int] = lambda tokens: 0):
        self.groups, self.reserve = groups, reserve
        self.group_of = {layer: g for g, group in enumerate(groups) for layer in group.layers}
        self.arrays: dict[int, Arrays] = {i: groups[g].spec.pool(groups[g].pool.size) for i, g in self.group_of.items()}
        mx.eval(self.arrays)  # run out of memory now, not in the first step
        for group in groups:
            group.pool.max_size = partial(self._max_size, group)

    def empty_states(self) -> tuple[LayerState, ...]:
        """The state of a sequence without tokens: one part per group."""
        return tuple(g.spec.empty(g.pool) for g in self.groups)

    @property
    def pending(self) -> bool:
        """Whether a `BlockPool` has promised growth or copies that the arrays do not have yet."""
        return any(g.pool.copies or g.pool.size > self.arrays[g.layers[0]][0].shape[0] for g in self.groups)

    def apply_pending(self) -> None:
        """Grow the arrays and copy shared blocks, as the host has promised. Nothing may be reading the pools."""
        for group in self.groups:
            pairs, group.pool.copies = group.pool.copies, []
            old, new = (mx.array([b.check() for b in ends]) for ends in zip(*pairs)) if pairs else (None, None)
            for i in group.layers:
                arrays = self.arrays.pop(i)
                if group.pool.size > arrays[0].shape[0]:
                    arrays = tuple(extend(p, group.pool.size) for p in arrays)
                if pairs:
                    sources = [p[old] for p in arrays]
                    mx.eval(arrays, sources)  # read before writing: MLX copies a pool that still has a reader
                    arrays = tuple(update(p, new, x) for p, x in zip(arrays, sources))
                mx.eval(arrays)  # one layer at a time: the old and the new pool exist together
                self.arrays[i] = arrays
        self.arrays = dict(sorted(self.arrays.items()))

    def _max_size(self, group: Group, wanted: int) -> int:
        """The largest size up to `wanted` that a group's pools can grow to in the device's memory."""
        pool, block = group.pool, group.nbytes(1)
        if wanted == pool.size:
            return wanted
        step = self.reserve(wanted * group.spec.size if group.spec.paged else 0)
        need = (wanted - pool.size) * block + self._pending_bytes() + step
        total, free = device.memory()
        if need > free:
            device.release_cache()
            total, free = device.memory()
        if device.backend() != "cpu":
            device.limit_mlx(mx.get_memory_limit(), free)
        if need <= free:
            pool.shortage = ""
            return wanted
        fits = max(pool.size, wanted + (free - need) // block)  # rounded down
        shortage = f"{wanted - pool.size} more blocks take {need} bytes, the device has {free} of {total} bytes free"
        if not pool.shortage:
            log.warning(f"the KV cache stays at {fits} blocks: {shortage}")
        pool.shortage = shortage
        return fits

    def _pending_bytes(self) -> int:
        """Growth that is promised, and the copy of the largest layer that is grown."""
        promised = [g.nbytes(g.pool.size - self.arrays[g.layers[0]][0].shape[0]) for g in self.groups]
        return sum(promised) + max(sum(a.nbytes for a in arrays) for arrays in self.arrays.values())

    def read(self, state: SequenceState) -> dict[str, mx.array]:
        """The blocks of a state, as `layer.<i>.<n>` arrays."""
        if not all(g.spec.portable for g in self.groups):
            raise BadSnapshot("a model that runs through mlx-lm keeps its memory there: its sessions cannot be saved")
        if self.pending:
            mx.synchronize()
            self.apply_pending()
        arrays: dict[str, mx.array] = {}
        for i, g in self.group_of.items():
            ids = mx.array([b.check() for b in state.parts[g].blocks])
            arrays |= {f"layer.{i}.{n}": p[ids] for n, p in enumerate(self.arrays[i])}
        mx.eval(arrays)
        return arrays

    def write(
        self, tokens: tuple[int, ...], described: list[dict[str, int]], arrays: dict[str, mx.array]
    ) -> SequenceState:
        """A state of these tokens in newly allocated blocks that hold what `read` returned."""
        parts, ids, empty = [], [], self.empty_states()
        for g, group in enumerate(self.groups):
            blocks = tuple(group.pool.allocate(arrays[f"layer.{group.layers[0]}.0"].shape[0]))
            ids.append(mx.array([b.check() for b in blocks]))
            parts.append(empty[g].restore(blocks, len(tokens), described[g]))
        mx.synchronize()
        self.apply_pending()
        for i, g in self.group_of.items():
            old = self.arrays.pop(i)
            self.arrays[i] = tuple(update(p, ids[g], arrays[f"layer.{i}.{n}"]) for n, p in enumerate(old))
        mx.eval(self.arrays)
        return SequenceState(tuple(tokens), tuple(parts))

    def clear(self) -> None:
        self.arrays.clear()
