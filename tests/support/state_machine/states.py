"""Operations on states as values: hold, feed, rewind, put, copy through a file, take a block away.

Everything a holder does here must be invisible to every other holder; the logits of each fed token are judged.
"""

from itertools import count

import mlx.core as mx

from mlxrt.cache import SequenceState
from mlxrt.cache.storage.snapshot import load_state, save_state
from mlxrt.engine.request import Request
from mlxrt.engine.sequence import Sequence
from mlxrt.errors import CannotRewind

from . import invariants
from .stage import Stage

IDS = count(1 << 20)  # never those of the scheduler
MOST = 4  # values held at once


class StateOps(Stage):
    """The part of a machine that plays with values."""

    def held(self, a: int) -> SequenceState | None:
        return self.holds[a % len(self.holds)] if self.holds else None

    def keep(self, state: SequenceState) -> None:
        self.holds.append(state)
        del self.holds[:-MOST]

    def do_hold(self, a: int, b: int, *_: int) -> None:
        """What the store holds of a text."""
        text = self.prompts[a % len(self.prompts)]
        text = text[: len(text) - b % 9]
        state = self.engine.state(text)
        if state is None or self.overflows(state.tokens):  # that token itself may be cached: all that follows is NaN
            return
        invariants.require(state.tokens == text[: len(state)], f"asked for {text}, found {state.tokens}")
        self.keep(state)
        self.tally["values found"] += 1
        self.trace.append(f"hold {len(state)} of {len(text)} tokens")

    def do_drop(self, a: int, *_: int) -> None:
        if self.holds:
            self.holds.pop(a % len(self.holds))

    def do_feed(self, a: int, b: int, c: int, d: int) -> None:
        """Go on from a value, which stays as it is: feeding it twice is a fork."""
        state = self.held(a) if a % 4 else None
        state = state or SequenceState((), self.engine.core.pools.empty_states())
        new = (
            self.prompt(b, c, d)[: 1 + c % 20]
            if len(state) == 0
            else [(60 + (d + j * j) % 7) for j in range(1 + c % 12)]
        )
        self.feed(state, tuple(new), 1 + d % 13)

    def feed(self, state: SequenceState, new: tuple[int, ...], size: int) -> SequenceState | None:
        """The value with more tokens in it; None where there is no room for it, or where it overflows."""
        tokens = (*state.tokens, *new)
        if len(tokens) > self.engine.context or self.overflows(tokens):
            return None
        self.trace.append(f"feed {len(new)} tokens {list(new)} to a value of {len(state)}, {size} at a time")
        made = self.refused(lambda: self._fed(state, tokens, size))
        if made is None:
            return None
        rows, grown = made
        self.checker.check_logits(tokens, rows, f"feeding {list(new)} to {len(state)} tokens")
        for part in grown.parts:
            invariants.check_part(part)
        self.keep(grown)
        self.tally["values fed"] += 1
        self.tally["values continued"] += bool(len(state))
        return grown

    def _fed(self, state: SequenceState, tokens: tuple[int, ...], size: int) -> tuple[mx.array, SequenceState]:
        engine, rows = self.engine, []
        seq = Sequence(next(IDS), Request(tokens=(0,)), tokens, parts=state.parts, length=len(state))
        try:
            while seq.length < len(tokens):
                rows.append(engine.core.feed(seq, min(size, len(tokens) - seq.length)))
        finally:
            engine.core.runner.flush()  # whatever takes a value out of a running sequence flushes its tail
        return mx.concatenate(rows), SequenceState.fit(tokens, seq.parts)

    def do_rewind(self, a: int, b: int, c: int, d: int) -> None:
        """Cut a value back, or be told that it cannot be, and go on from there: up to three times in a row."""
        state = self.held(a)
        if state is None or len(state) < 16:  # nothing worth cutting
            text = self.prompts[a % len(self.prompts)][: 16 + b % 20]
            state = self.feed(SequenceState((), self.engine.core.pools.empty_states()), text, 1 + c % 9)
        for k in range(1 + d % 3):
            if state is None or not len(state):
                return
            cut = self.rewind(state, b >> 2 * k)
            if cut is None:
                return
            self.keep(cut)
            new = tuple(60 + (c + j + k) % 9 for j in range(1 + (c + k) % 5))
            state = self.feed(cut, new, 1 + d % 4)

    def rewind(self, state: SequenceState, b: int) -> SequenceState | None:
        """Often to the shortest it can be, sometimes beyond."""
        n = (state.floor, max(0, state.floor - 1 - b % 4), max(0, len(state) - b % 12))[b % 3]
        if 0 < n < state.floor:
            try:
                state.rewind(n)
            except CannotRewind:
                self.tally["rewinds refused"] += 1
                return None
            raise AssertionError(f"a value of {state.floor}..{len(state)} tokens was cut to {n}")
        cut = state.rewind(n)
        invariants.require(len(cut) == n and cut.tokens == state.tokens[:n], f"cut to {n}, became {len(cut)}")
        self.tally["values rewound"] += n < len(state)
        self.trace.append(f"rewind a value of {len(state)} to {n}")
        return cut

    def do_put(self, a: int, *_: int) -> None:
        """Give a value to the store."""
        if (state := self.held(a)) is not None:
            self.store.insert(state)
            self.tally["values stored"] += 1
            self.trace.append(f"put a value of {len(state)} tokens")

    def do_freeze(self, a: int, *_: int) -> None:
        """A value to a file and back, beside the one it was."""
        if (state := self.held(a)) is None or not len(state):
            return
        engine, path = self.engine, self.folder / "value"
        engine.core.runner.flush()
        save_state(path, engine.core.pools, state, engine.core.identity(), {})
        loaded = self.refused(
            lambda: load_state(path, engine.core.pools, engine.core.pools.empty_states(), engine.core.identity())
        )
        if loaded is not None:
            invariants.require(loaded[0].tokens == state.tokens, "a file gave other tokens back")
            self.keep(loaded[0])
            self.tally["values through a file"] += 1
            self.trace.append(f"a value of {len(state)} tokens went through a file")

    def do_score(self, a: int, b: int, c: int, *_: int) -> None:
        tokens = self.prompts[a % len(self.prompts)][: 1 + b % 40]
        if len(tokens) > self.engine.context:
            return
        rows = self.refused(lambda: self.engine.score(tokens, 1 + c % 20))
        if rows is not None and self.overflows(tokens):
            self.tally["scores that overflowed"] += 1
        elif rows is not None:
            self.checker.check_logits(tokens, rows, f"score of {list(tokens)}")
            self.tally["scores"] += 1
