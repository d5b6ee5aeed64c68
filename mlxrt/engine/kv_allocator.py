"""Allocates KV blocks for sequences and decides what goes to the prefix cache. Imports no mlx.

Which sequence may grow, and when, is up to the scheduler.
"""

from collections.abc import Callable, Iterable

from ..cache import BlockTable, LayerState, PrefixCache, SequenceState
from ..errors import NoRoom, WontFit
from .sequence import Sequence, Slice, Step


class KVAllocator:
    def __init__(self, empty: Callable[[], tuple[LayerState, ...]], cache: PrefixCache | None):
        self.empty, self.cache = empty, cache
        self.has_checkpoints = any(part.has_checkpoints for part in empty())
        windows = [p.window + p.slack for p in empty() if isinstance(p, BlockTable) and p.window]
        self._shortest_window = min(windows) if cache is not None and windows else None
        self.shortage = ""  # why the last growth that failed did

    def grow(self, seq: Sequence, n: int) -> bool:
        """Allocate n more tokens of a sequence, evicting cached prefixes if need be. False when memory is short."""
        self.cache_prefix(seq)  # before window layers free blocks that only they hold
        checkpoints = self.cache is not None
        while True:
            try:
                seq.parts = tuple([part.grow(n, checkpoints) for part in seq.parts])
                seq.length += n
                return True
            except NoRoom as full:
                if self.cache is not None and self.cache.evict(full.pool):
                    continue
                if not (checkpoints and self.has_checkpoints):
                    self.shortage = str(full)
                    return False
                checkpoints = False  # a request goes on rather than leave checkpoints for others

    def frees_unchecked(self, chunk: int) -> bool:
        """Whether a window layer may free blocks of a chunk when its sequence grows by the next one: what is to be
        cached of them must be known to be finite by then."""
        return self._shortest_window is not None and chunk >= self._shortest_window

    def end_launch(self, step: Step) -> None:
        """A step is launched: free what its sequences held for it alone."""
        if self.has_checkpoints:
            for s in step.slices:
                s.seq.parts = tuple([part.after_step() for part in s.seq.parts])

    def step_of(self, seq: Sequence, n: int) -> Step:
        """A step that computes the next n known tokens of a sequence the scheduler does not own."""
        if not self.grow(seq, n):
            raise WontFit(
                f"no memory for {n} more tokens beside what is running ({self.shortage}); wait, or raise kv_memory"
            )
        return Step((Slice(seq, seq.length - n, seq.length, False),), self.checkpoint(seq))

    def checkpoint(self, seq: Sequence) -> bool:
        """Note the lengths at which every layer has a state: they are cached once their tokens are known."""
        if self.cache is None:
            return False
        stops = [set(part.checkpoints) for part in seq.parts if part.has_checkpoints]
        lengths = sorted(set.intersection(*stops)) if stops else []
        seq.checkpoints += [tuple(part.checkpoint_at(n) for part in seq.parts) for n in lengths]
        return bool(lengths)

    def cache_prefix(self, seq: Sequence, partial: bool = False) -> None:
        """Put what is known and computed into the prefix cache: full nodes, and with `partial` the rest too."""
        if self.cache is None:
            return
        known, salt = seq.cacheable, seq.request.cache_salt
        while seq.checkpoints and seq.checkpoints[0][0].length <= known:
            parts = seq.checkpoints.pop(0)
            seq.stored = self.cache.insert(SequenceState(tuple(seq.tokens[: parts[0].length]), parts), seq.stored, salt)
        if not partial and any(part.has_checkpoints for part in seq.parts):
            return  # only a checkpoint is sure to reach the pools
        n = min(known, seq.length)
        if not partial:
            n -= n % self.cache.node_size
        done = seq.stored.depth * self.cache.node_size if seq.stored is not None and seq.stored.alive else 0
        if n > done and n >= max(part.floor for part in seq.parts):
            seq.stored = self.cache.insert(SequenceState.fit(tuple(seq.tokens[:n]), seq.parts), seq.stored, salt)

    def fits(self, seq: Sequence, running: Iterable[Sequence]) -> bool:
        """Whether a prompt fits beside what runs if every cached prefix is evicted."""
        need = len(seq.tokens) + 1
        for g, part in enumerate(self.empty()):
            blocks = part.num_blocks(need)
            if blocks > part.pool.available:
                live = {b.id for other in running for b in other.parts[g].blocks}
                if blocks > part.pool.limit - 1 - len(live):
                    return False
        return True

    def fits_to_end(self, lengths: list[int], step: int) -> bool:
        """Whether sequences of these final lengths, computed in such steps, fit together without preemption."""
        return all(sum(part.num_blocks(n, step) for n in lengths) < part.pool.limit for part in self.empty())
