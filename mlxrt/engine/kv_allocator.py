"""What sequences hold, how they get more of it, and what of it stays for whoever comes next. Imports no mlx.

Knows nothing of turns and budgets: who may grow, and when, is the scheduler's business.
"""

from collections.abc import Callable

from ..cache import LayerState, PrefixCache, SequenceState
from ..errors import NoRoom
from .request import Sequence


class Room:
    def __init__(self, empty: Callable[[], tuple[LayerState, ...]], store: PrefixCache | None):
        self.empty, self.store = empty, store

    def grow(self, seq: Sequence, n: int) -> bool:
        """Room for n more tokens of a sequence, at the expense of stored prefixes. False when there is none."""
        self.keep(seq)  # before window layers let go of what only they hold
        while True:
            try:
                seq.parts = tuple([part.grow(n) for part in seq.parts])
                seq.length += n
                return True
            except NoRoom as full:
                if self.store is None or not self.store.evict(full.pool):
                    return False

    def mark(self, seq: Sequence) -> bool:
        """Note the lengths at which every part of the grown sequence exists: they can be kept when tokens are known."""
        if self.store is None:
            return False
        stops = [set(part.checkpoints) for part in seq.parts if part.sparse]
        lengths = sorted(set.intersection(*stops)) if stops else []
        seq.marks += [tuple(part.checkpoint_at(n) for part in seq.parts) for n in lengths]
        return bool(lengths)

    def keep(self, seq: Sequence, whole: bool = False) -> None:
        """Put what is known and computed into the store: whole nodes, and at the end the rest."""
        if self.store is None:
            return
        while seq.marks and seq.marks[0][0].length <= len(seq.tokens):
            parts = seq.marks.pop(0)
            seq.stored = self.store.insert(SequenceState(tuple(seq.tokens[: parts[0].length]), parts), seq.stored)
        if not whole and any(part.sparse for part in seq.parts):
            return  # only what was marked is sure to reach the pool
        n = min(len(seq.tokens), seq.length)
        if not whole:
            n -= n % self.store.node_size
        done = seq.stored.depth * self.store.node_size if seq.stored is not None and seq.stored.alive else 0
        if n > done and n >= max(part.floor for part in seq.parts):
            seq.stored = self.store.insert(SequenceState.fit(tuple(seq.tokens[:n]), seq.parts), seq.stored)
