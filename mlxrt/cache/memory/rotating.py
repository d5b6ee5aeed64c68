"""A window of keys and values in one place per sequence, written round and round.

Nothing is allocated while a sequence runs and its memory never grows; sharing a place copies it. `keep` first tokens
stay for ever (attention sinks). Slots beyond the window make short rewinds exact and bound a step's length.
"""

from dataclasses import dataclass

import mlx.core as mx

from ..layer_state import RotatingState
from .paged import PagedKV


@dataclass(frozen=True)
class RotatingKV(PagedKV):
    """`size` slots: `keep` for the first tokens, then window + slack for the rest."""

    window: int = 512
    keep: int = 0
    slack: int = 64
    stride: int = 128  # tokens between two checkpoints: each copies the place
    paged = False

    @classmethod
    def of(cls, spec: PagedKV, window: int, keep: int = 0, slack: int = 64, stride: int = 128) -> "RotatingKV":
        return cls(spec.heads, spec.dim, spec.codec, keep + window + slack, window, keep, slack, stride)

    @property
    def signature(self) -> str:
        own = f"window={self.window}, keep={self.keep}, slack={self.slack}, stride={self.stride}"
        return f"RingKV({self.fields_text()}, {own})"

    @property
    def max_step(self) -> int:  # type: ignore[override]
        """A step writes all its tokens before it reads: more would overwrite what its first token still sees."""
        return self.slack + 1

    def empty(self, pool):
        return RotatingState(pool, self.size, self.window, self.keep, stride=self.stride)

    def index(self, states, rows, alone=False, compiled=False, held=None, tail=None):
        ends = [s.length for s in states] + [0] * (rows - len(states))
        return super().index(states, rows, alone, compiled, held, tail) | {"end": mx.array(ends)}

    def slots(self, positions, row, index):
        turn = self.size - self.keep
        gone = (positions >= self.keep) & (positions < index["end"][row] - turn)  # a long flush may pass a slot twice
        slot = mx.where(positions < self.keep, positions, self.keep + (positions - self.keep) % turn)
        return mx.where(gone, 0, index["table"][row, 0]), slot

    def known(self, index):
        last, turn = index["end"][:, None] - 1, self.size - self.keep
        slot = mx.arange(self.size)
        newest = last - (last - slot) % turn  # the last position that was written to this slot
        return mx.where(slot < self.keep, mx.where(slot <= last, slot, -1), mx.where(newest < self.keep, -1, newest))

    def reach(self, index, r, end):
        return -1, self.size
