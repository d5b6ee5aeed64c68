"""What every operation of the machine needs: the engine, what was said so far, and patience where room is short."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from mlxrt import Engine, EngineConfig, Session
from mlxrt.cache import PrefixCache, SequenceState
from mlxrt.engine.request import Event
from mlxrt.engine.sequence import Sequence
from mlxrt.errors import BadLogits, NoRoom, WontFit

from ..poison import Poison
from . import invariants, kinds
from .checker import Checker
from .program import Program

T = TypeVar("T")
LONGEST = 60  # tokens of a prompt


class Stage:
    def __init__(self, program: Program, checker: Checker, folder: Path):
        self.program, self.checker, self.tally, self.folder = program, checker, checker.tally, folder
        self.trace: list[str] = []
        self.prompts: list[tuple[int, ...]] = list(kinds.stems())
        self.holds: list[SequenceState] = []
        self.forgiven: list[Exception | None] = []  # requests' errors that were this machine's own doing
        self.sessions: list[Session] = []
        self.saved: dict[Path, tuple] = {}  # the turns that each file must give back
        self.poison: Poison | None = None
        self.engine = self.start(program.ahead, program.chunk)

    def start(self, ahead: int, chunk: int) -> Engine:
        p = self.program
        config = EngineConfig(
            ahead=ahead,
            chunk=chunk,
            max_running=p.running,
            kv_memory=kinds.memory_for(p.kind, p.capacity),
            compile=p.compiled,
        )
        self.trace.append(f"engine: ahead {ahead}, chunk {chunk}")
        engine = Engine(kinds.engine_model(p.kind), config, kinds.tokenizer())
        if kinds.is_poisoned(p.kind):
            self.poison = Poison(engine)
        return engine

    @property
    def store(self) -> PrefixCache:
        store = self.engine.core.prefix_cache
        assert store is not None
        return store

    def busy(self) -> bool:
        return bool(self.engine.core.scheduler.running or self.engine.core.scheduler.waiting)

    # What may have to wait for room

    def patient(self, act: Callable[[], T]) -> T:
        """Run what may find no room because of the values this machine holds: then it lets them go and tries again."""
        with contextlib.suppress(WontFit, NoRoom):
            return act()
        # Here, not in an except clause: the error's traceback would hold the memory that is to be freed.
        if self.holds:
            self.holds.clear()
            self.tally["values dropped for room"] += 1
            self.trace.append("no room: all held values dropped")
        return act()

    def refused(self, act: Callable[[], T]) -> T | None:
        """Run what may rightly be refused while others run or hold memory; None then."""
        with contextlib.suppress(WontFit, NoRoom):
            return self.patient(act)
        self.tally["refused for room"] += 1
        self.trace.append("refused for want of room")
        self.store.clear()
        used = any(group.pool.used for group in self.engine.core.pools.groups)
        invariants.require(used, "refused for want of room, and nobody holds any")
        return None

    def advance(self) -> bool:
        self.tally["steps"] += 1
        ahead = len(self.engine.core._inflight)
        self.tally[f"steps with {ahead} in the air"] += 1
        held = bool(self.holds)
        moved = self.engine.step()
        for state in self.engine.core.outputs.states.values():
            if state.seq.finish == "error" and state.inbox:
                self.give_way(state.seq, state.inbox[-1].error, held)
        return moved

    def overflows(self, tokens: Iterable[int]) -> bool:
        return kinds.is_poisoned(self.program.kind) and kinds.OVERFLOW in tokens

    def give_way(self, seq: Sequence, error: Exception | None, held: bool) -> None:
        """A request ended for want of room: right only where this machine itself held values. It lets them go."""
        if error in self.forgiven:
            return
        if isinstance(error, BadLogits) and self.overflows(seq.tokens):
            self.forgiven.append(error)
            self.tally["requests that overflowed"] += 1
            self.trace.append(f"request {seq.id} overflowed")
            return
        invariants.require(isinstance(error, WontFit), f"a request ended with {error!r}")
        invariants.require(held, f"nobody but the request held memory, and it ended: {error}")
        self.forgiven.append(error)
        self.holds.clear()
        self.tally["requests ended for room"] += 1
        self.trace.append("no room for a request: all held values dropped")

    def event(self, stream: Iterator[Event], id: int) -> Event:
        """The next event of a request; a stream alone would wait for ever where nothing runs any more."""
        while not self.engine.core.outputs.states[id].inbox:
            invariants.require(self.advance(), f"nothing is left to do and request {id} has not ended")
        return next(stream)

    def prompt(self, a: int, b: int, c: int) -> tuple[int, ...]:
        """Part of an earlier text, and perhaps something new from a small alphabet: collisions are wanted."""
        base = self.prompts[a % len(self.prompts)][:LONGEST]
        kept = base[: (len(base), len(base) - 1, len(base) - b % 16, b % (len(base) + 1))[b % 4]]
        new = tuple(60 + (c // 6 * (j + 1) + j) % 4 for j in range(c % 6))
        if kinds.is_poisoned(self.program.kind) and (a + b + c) % 5 == 0:
            new = (*new[: b % 3], kinds.OVERFLOW, *new[b % 3 :])
        return (*kept, *new) or (7,)
