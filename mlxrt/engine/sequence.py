"""Sequences and steps: the scheduler's record of a request, and the slices of it that one forward pass computes.

Plain data without mlx. Only the scheduler, the KV allocator and the model runner change a `Sequence`.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..cache.layer_state import LayerState
from .request import Finish, Request, SamplingParams

NOTHING_UNCHECKED = 1 << 62


@dataclass(eq=False)
class Sequence:
    """One request while it lives. Compared by identity, so that sets and dictionaries of sequences are cheap."""

    id: int
    request: Request
    prompt: tuple[int, ...]
    stops: frozenset[int] = frozenset()
    seed: int = 0
    tokens: list[int] = field(default_factory=list)  # known on the host, the prompt included
    parts: tuple[LayerState, ...] = ()
    length: int = 0  # tokens inside the parts
    cached: int = 0
    max_cached: int = 1 << 62  # tokens that may go to the prefix cache: what comes after has no finite keys and values
    unchecked: int = NOTHING_UNCHECKED  # where its first chunk begins that is not known to be finite yet
    finish: Finish | None = None
    # Sampled, still on the device: (tokens of a step, row).
    pending: list[tuple[Any, int]] = field(default_factory=list)
    checkpoints: list[tuple[LayerState, ...]] = field(default_factory=list)  # whose tokens may not be known yet
    stored: Any = None  # the prefix cache's node up to which this sequence is stored
    queue_key: float = 0.0  # its rank in the waiting queue, see queue.py
    deadline: float | None = None  # on the scheduler's clock
    seen: int = 0  # prompt tokens the engine had launched when this sequence last got a token
    preempted: int = 0  # times its memory was taken
    admitted: bool = False  # has run before
    followed: bool = False  # has waited for a prefix that another sequence computed
    forced: list[int] = field(default_factory=list)  # tokens that come instead of the next sampled ones
    max_pending: int | None = None  # tokens that may be sampled before it is known whether one is forced
    grammar: Any = None  # text.grammar.GrammarMatcher of its response_format, up to the newest known token
    paused: bool = False  # its reader lags behind: no more tokens for now

    def __post_init__(self):
        self.tokens = list(self.prompt)

    def __len__(self) -> int:
        return len(self.tokens) + len(self.pending)

    @property
    def cacheable(self) -> int:
        """Tokens that may go to the prefix cache once they are computed."""
        return min(len(self.tokens), self.max_cached, self.unchecked)

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def todo(self) -> int:
        """Tokens that can be computed now."""
        if self.paused or (self.request.on_logits and self.pending):
            return 0  # a callback must see every token before the next logits exist
        if self.pending and self.max_pending is not None and len(self.pending) >= self.max_pending:
            return 0  # the token after those on the device may be a forced one
        left = len(self.prompt) + self.params.max_tokens - len(self)
        return len(self) - self.length if left > 0 or self.length < len(self) - 1 else 0

    @property
    def decoding(self) -> bool:
        """Only the newest token is left to compute; otherwise the sequence is still being prefilled."""
        return self.length >= len(self.prompt) and len(self) - self.length <= 1


@dataclass(frozen=True)
class Slice:
    """Tokens [start, stop) of one sequence. The slice that reaches its end samples."""

    seq: Sequence
    start: int
    stop: int
    samples: bool

    @property
    def is_chunk(self) -> bool:
        """Part of a prompt: several tokens, or one that is not the last. Other rows are judged by their logits."""
        return self.stop - self.start > 1 or not self.samples


@dataclass(frozen=True)
class Step:
    """One forward pass."""

    slices: tuple[Slice, ...]  # those of one token first
    checkpoint: bool = False  # a state inside the running batch will be cached: it must reach the pools
    prefill_tokens: int = 0

    @cached_property
    def decode(self) -> bool:
        return all(s.stop - s.start == 1 for s in self.slices)

    @cached_property
    def num_tokens(self) -> int:
        return sum(s.stop - s.start for s in self.slices)
