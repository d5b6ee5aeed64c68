"""Poisoned memory: what nobody owns is filled with NaN, so whoever reads it is noticed.

Filled are blocks that are free, blocks that were allocated and not written yet (late writes of ended sequences
included), the parts that pools grow by, and the slots of a decode tail before they are written. All cache kinds: keys
and values, quantised ones (their scales become NaN), rings, recurrent states.
"""

from typing import Any

import mlx.core as mx

from mlxrt import Engine
from mlxrt.cache.blocks import Block, BlockPool


class Poison:
    """Wraps an engine's runner and pools. On a CPU: it waits for every step."""

    def __init__(self, engine: Engine):
        core = engine.core
        self.runner, self.pools = core.runner, core.pools
        self.held: list[dict[int, int]] = [follow_allocations(group.pool) for group in self.pools.groups]
        self.written: list[dict[int, int]] = [{} for _ in self.pools.groups]  # block id -> generation when last written
        self.poisoned: list[dict[int, int]] = [{} for _ in self.pools.groups]  # and when last filled
        self.filled = 0  # blocks, so that a test can see that something happened
        run, flush, apply_pending, write = (
            self.runner.run,
            self.runner.flush,
            self.pools.apply_pending,
            self.pools.write,
        )

        def poisoned_run(*args: Any) -> Any:
            self.fill()
            result = run(*args)
            self.note_written()
            return result

        def poisoned_flush(*args: Any, **options: Any) -> None:
            flush(*args, **options)
            self.fill(again=True)  # it may have written blocks of sequences that have ended

        def poisoned_apply() -> None:
            copied = [[new.id for _, new in group.pool.copies] for group in self.pools.groups]
            apply_pending()
            for group, known, ids in zip(self.pools.groups, self.written, copied):
                known.update({id: group.pool.generations[id] for id in ids})
            self.fill()

        def poisoned_write(*args: Any) -> Any:
            state = write(*args)
            for part, known in zip(state.parts, self.written):
                known.update({b.id: b.generation for b in part.blocks})
            return state

        self.runner.run, self.runner.flush = poisoned_run, poisoned_flush  # type: ignore[method-assign]
        self.pools.apply_pending, self.pools.write = poisoned_apply, poisoned_write  # type: ignore[method-assign]
        self.runner.arrays.zeros = lambda shape, dtype: poison(shape, dtype)  # type: ignore[method-assign]

    def fill(self, again: bool = False) -> None:
        """Fill every block that has no owner, or that its owner has not written; `again`: those filled before too."""
        mx.synchronize()
        for group, known, done in zip(self.pools.groups, self.written, self.poisoned):
            pool = group.pool
            now = pool.generations
            size = self.pools.arrays[group.layers[0]][0].shape[0]
            ids = [i for i in range(1, min(size, pool.size)) if known.get(i) != now[i]]
            ids = [i for i in ids if again or done.get(i) != now[i]]
            done.update({i: now[i] for i in ids})
            self.filled += len(ids)
            for layer in group.layers if ids else ():
                arrays = self.pools.arrays[layer]
                for array in arrays:
                    array[mx.array(ids)] = poison((len(ids), *array.shape[1:]), array.dtype)
                mx.eval(arrays)

    def note_written(self) -> None:
        """A step was launched: what is allocated now has been, or will be, written by its owner."""
        for group, held, known in zip(self.pools.groups, self.held, self.written):
            known.clear()
            known.update({i: at for i, at in held.items() if group.pool.generations[i] == at})


def follow_allocations(pool: BlockPool) -> dict[int, int]:
    """Block id -> its generation when it was last allocated: a block that was freed since has another."""
    held: dict[int, int] = {}
    allocate = pool.allocate

    def followed(n: int = 1) -> list[Block]:
        blocks = allocate(n)
        held.update({block.id: block.generation for block in blocks})
        return blocks

    pool.allocate = followed  # type: ignore[method-assign]
    return held


def poison(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """NaN, or words that are NaN as scales of any dtype."""
    return mx.full(shape, 0xFFFFFFFF, dtype) if dtype == mx.uint32 else mx.full(shape, mx.nan, dtype)
