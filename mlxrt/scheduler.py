"""Who runs next. Owns every sequence from submission to finish. Imports no mlx.

There is no prefill phase and no decode phase: a sequence has tokens, memory that holds some of them, and the
scheduler lets the memory catch up.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from .cache import LayerState, PrefixStore, SequenceState
from .errors import ContextOverflow, NoRoom, WontFit
from .request import Finish, Request, Sequence


@dataclass(frozen=True)
class Slice:
    """Tokens [start, stop) of one sequence. The slice that reaches its end samples."""

    seq: Sequence
    start: int
    stop: int
    samples: bool


@dataclass(frozen=True)
class Step:
    slices: tuple[Slice, ...]  # those of one token first
    checkpoint: bool = False  # a state inside a running batch will be kept: it must reach the pool

    @property
    def decode(self) -> bool:
        return all(s.stop - s.start == 1 for s in self.slices)


@dataclass(frozen=True)
class Limits:
    running: int = 32
    chunk: int = 512  # tokens in a step
    length: int = 4096  # tokens of a sequence, prompt and output
    max_step: int = 1 << 30  # tokens of one sequence in a step


class Scheduler:
    def __init__(self, empty: Callable[[], tuple[LayerState, ...]], store: PrefixStore | None, limits: Limits):
        self.empty, self.store, self.limits = empty, store, limits
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._full = False  # somebody had to give its memory back: nobody is admitted until somebody finishes
        self._ids = count()

    def submit(
        self, request: Request, prompt: tuple[int, ...], stops: frozenset[int] = frozenset(), seed: int = 0
    ) -> Sequence:
        if len(prompt) >= self.limits.length:
            raise ContextOverflow(len(prompt), self.limits.length)
        seq = Sequence(next(self._ids), request, prompt, stops, seed)
        self.waiting.append(seq)
        return seq

    def finish(self, seq: Sequence, reason: Finish) -> None:
        """End a sequence now. What it has computed stays in the store."""
        if seq.finish:
            return
        seq.finish = reason
        if seq in self.running:
            self.running.remove(seq)
            self.keep(seq, whole=True)
        else:
            self.waiting.remove(seq)
        seq.parts, seq.stored, seq.marks = (), None, []
        self._full = False

    def plan(self) -> Step | None:
        self._admit()
        budget, slices, marked = self.limits.chunk, [], False
        for seq in sorted(self.running, key=lambda s: s.todo):
            todo = seq.todo
            n = self._take(seq, min(todo, budget, self.limits.max_step))
            if n > 0:
                slices.append(Slice(seq, seq.length - n, seq.length, n == todo))
                budget -= n
                marked |= self.mark(seq)
        if not slices and self._stuck():
            return self.plan()
        # A long prompt may have been cut down to one token: rows of one token come first.
        slices.sort(key=lambda s: s.stop - s.start > 1)
        return Step(tuple(slices), marked) if slices else None

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.limits.running and not (self._full and self.running):
            seq = self.waiting.popleft()
            seq.parts, seq.length = self.empty(), 0
            if self.store is not None and (state := self.store.resume(seq.tokens)):
                seq.parts, seq.length = state.parts, len(state)
                seq.cached = seq.cached or len(state)
            self.running.append(seq)

    def _take(self, seq: Sequence, n: int) -> int:
        """How many of n tokens the sequence got room for. Whoever runs alone takes a smaller step rather than none."""
        while n > 0 and not self.grow(seq, n):
            n = n // 2 if len(self.running) == 1 else 0
        return n

    def grow(self, seq: Sequence, n: int) -> bool:
        """Room for n more tokens of a sequence, at the expense of stored prefixes. False when there is none."""
        self.keep(seq)  # before window layers let go of what only they hold
        while True:
            try:
                seq.parts = tuple(part.grow(n) for part in seq.parts)
                seq.length += n
                return True
            except NoRoom as full:
                if self.store is None or not self.store.evict(full.pool):
                    return False

    def mark(self, seq: Sequence) -> bool:
        """Note the lengths at which every part of the grown sequence exists: they can be kept when tokens are known."""
        if self.store is None:
            return False
        stops = [set(part.stops) for part in seq.parts if part.sparse]
        lengths = sorted(set.intersection(*stops)) if stops else []
        seq.marks += [tuple(part.at(n) for part in seq.parts) for n in lengths]
        return bool(lengths)

    def keep(self, seq: Sequence, whole: bool = False) -> None:
        """Put what is known and computed into the store: whole nodes, and at the end the rest."""
        if self.store is None:
            return
        while seq.marks and seq.marks[0][0].length <= len(seq.tokens):
            parts = seq.marks.pop(0)
            seq.stored = self.store.put(SequenceState(tuple(seq.tokens[: parts[0].length]), parts), seq.stored)
        if not whole and any(part.sparse for part in seq.parts):
            return  # only what was marked is sure to reach the pool
        n = min(len(seq.tokens), seq.length)
        if not whole:
            n -= n % self.store.size
        done = seq.stored.depth * self.store.size if seq.stored is not None and seq.stored.alive else 0
        if n > done and n >= max(part.floor for part in seq.parts):
            seq.stored = self.store.put(SequenceState.fit(tuple(seq.tokens[:n]), seq.parts), seq.stored)

    def _stuck(self) -> bool:
        """No room for anybody and nothing on its way: the youngest gives its memory back and goes on later."""
        want = [s for s in self.running if s.todo]
        if not want or any(s.pending for s in self.running):
            return False
        if len(self.running) == 1:
            raise WontFit(f"request {want[0].id} needs more than the whole cache at {want[0].length} tokens")
        seq = self.running.pop()
        self.keep(seq, whole=True)
        seq.parts, seq.stored, seq.marks, seq.length = (), None, [], 0
        self.waiting.appendleft(seq)
        self._full = True
        self.preemptions += 1
        return True

    def commit(self, s: Slice, token: int) -> bool:
        """A sampled token has arrived. False when its sequence had ended while the step was running."""
        seq = s.seq
        if seq.finish:
            return False
        seq.pending.pop(0)
        seq.tokens.append(token)
        if token in seq.stops:
            self.finish(seq, Finish.STOP)
        elif len(seq.tokens) - len(seq.prompt) >= seq.params.max_tokens or len(seq.tokens) >= self.limits.length:
            self.finish(seq, Finish.LENGTH)
        return True
