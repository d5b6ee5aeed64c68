"""Rotating KV cache: a window of keys and values in one block per sequence, overwritten in turn.

Memory never grows and nothing is allocated while a sequence runs; sharing the block copies it. The first `keep` tokens
stay (attention sinks). Slots beyond the window make short rewinds exact and bound a step's length.
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
    stride: int = 128  # tokens between two checkpoints: each copies the block
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
        """A step writes all its tokens before it reads: more would overwrite keys that its first token still sees."""
        return self.slack + 1

    def empty(self, pool):
        return RotatingState(pool, self.size, self.window, self.keep, stride=self.stride)

    def index(self, states, rows, prefill=False, compiled=False, arrays=None, tail=None):
        ends = [s.length for s in states] + [0] * (rows - len(states))
        return super().index(states, rows, prefill, compiled, arrays, tail) | {"end": mx.array(ends)}

    def slot_mapping(self, positions, row, index):
        period = self.size - self.keep
        stale = (positions >= self.keep) & (positions < index["end"][row] - period)  # a long flush may wrap around
        slot = mx.where(positions < self.keep, positions, self.keep + (positions - self.keep) % period)
        return mx.where(stale, 0, index["table"][row, 0]), slot

    def key_positions(self, index):
        last, period = index["end"][:, None] - 1, self.size - self.keep
        slot = mx.arange(self.size)
        newest = last - (last - slot) % period  # the last position written to this slot
        return mx.where(slot < self.keep, mx.where(slot <= last, slot, -1), mx.where(newest < self.keep, -1, newest))

    def key_range(self, index, r, end):
        return -1, self.size
