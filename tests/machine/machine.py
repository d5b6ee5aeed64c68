"""Runs a program on an engine and has every token judged: requests, steps, cancels, evictions, restarts.

Operations on values (states.py) and on conversations (talk.py) are mixed in from their own files. The machine keeps a
trace in words: a failure shows what was done, not the numbers it was made of.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from mlxrt import ContextOverflow, Engine, EngineConfig
from mlxrt.cache import SequenceState
from mlxrt.errors import MlxrtError, NoRoom, WontFit
from mlxrt.request import Event, Sequence
from mlxrt.stream import Stream

from . import invariants, kinds
from .judge import Judge, asked
from .program import Program
from .states import StateOps
from .talk import TalkOps

T = TypeVar("T")
LONGEST = 60  # tokens of a prompt


@dataclass
class Asked:
    """A request under way."""

    stream: Stream
    seq: Sequence


class Machine(StateOps, TalkOps):
    def __init__(self, program: Program, judge: Judge, folder: Path):
        self.program, self.judge, self.tally, self.folder = program, judge, judge.tally, folder
        self.trace: list[str] = []
        self.texts: list[tuple[int, ...]] = list(kinds.stems())
        self.asked: list[Asked] = []
        self.holds: list[SequenceState] = []
        self.sessions = []
        self.saved: dict[Path, tuple] = {}
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
        return Engine(kinds.model(p.kind), config, kinds.tokenizer())

    def run(self) -> None:
        for name, *numbers in self.program.ops:
            getattr(self, f"do_{name}")(*numbers)
            invariants.check(self.engine)
        self.wind_up()
        self.tally["programs"] += 1

    def wind_up(self) -> None:
        """Let everything end, judge it, drop it, and see that nothing is left."""
        while self.asked:
            self.conclude(self.asked[0])
        while self.advance():
            continue
        self.note_totals()
        self.holds.clear()
        self.sessions.clear()
        self.engine.store.clear()
        # A copy promised to a growth that then found no room is made, and forgotten, by the next step.
        self.engine.runner.settle()
        self.engine.runner.move()
        invariants.check_empty(self.engine)

    def note_totals(self) -> None:
        stats = self.engine.stats()
        self.tally["evictions"] += stats.evictions
        self.tally["preemptions"] += stats.preemptions
        self.tally["prefix hits"] += stats.hits
        self.tally["steps waited for"] += self.engine.runner.waits

    # What may have to wait for room

    def patient(self, act: Callable[[], T]) -> T:
        """Run what may find no room because of the values this machine holds: then it lets them go and tries again."""
        try:
            return act()
        except (WontFit, NoRoom):
            if not self.holds:
                raise
            self.holds.clear()
            self.tally["values dropped for room"] += 1
            self.trace.append("no room: all held values dropped")
            return act()

    def refused(self, act: Callable[[], T]) -> T | None:
        """Run what may rightly be refused while others run; None then."""
        try:
            return self.patient(act)
        except (WontFit, NoRoom) as error:
            if not self.engine.scheduler.running and not isinstance(error, NoRoom):
                raise
            self.tally["refused for room"] += 1
            self.trace.append(f"refused: {error}")
            return None

    def advance(self) -> bool:
        self.tally["steps"] += 1
        ahead = len(self.engine._flights)
        self.tally[f"steps with {ahead} in the air"] += 1
        return self.patient(self.engine.step)

    def event(self, stream: Iterator[Event], id: int) -> Event:
        """The next event of a request; a stream alone would wait for ever where nothing runs any more."""
        while not self.engine._tickets[id].inbox:
            invariants.require(self.advance(), f"nothing is left to do and request {id} has not ended")
        return next(stream)

    # Requests

    def prompt(self, a: int, b: int, c: int) -> tuple[int, ...]:
        """Part of an earlier text, and perhaps something new from a small alphabet: collisions are wanted."""
        base = self.texts[a % len(self.texts)][:LONGEST]
        kept = base[: len(base) - b % 16] if b % 3 else base[: b % (len(base) + 1)]
        new = tuple(60 + (c * (j + 3) + j) % 5 for j in range(c % 6))
        return (*kept, *new) or (7,)

    def do_submit(self, a: int, b: int, c: int, d: int) -> None:
        """One to three at once, which begin alike and then part."""
        for k in range(1 + d % 3):
            self.submit(self.prompt(a, b + k, c + 2 * k), 1 + (b + 5 * d + 7 * k) % 24, c + k, seed=a * 64 + c)

    def submit(self, prompt: tuple[int, ...], n: int, mood: int, seed: int) -> None:
        request = asked(prompt, n, mood, seed)
        try:
            stream = self.engine.stream(request)
        except ContextOverflow:
            invariants.require(len(prompt) >= self.engine.context, f"{len(prompt)} tokens refused")
            self.tally["prompts too long"] += 1
            return
        seq = self.engine._tickets[stream.ids[0]].seq
        self.trace.append(f"submit {seq.id}: {len(prompt)} tokens {list(prompt)}, {n} wanted, mood {mood % 8}")
        self.asked.append(Asked(stream, seq))
        self.tally["submits"] += 1

    def do_step(self, a: int, *_: int) -> None:
        for _ in range(1 + a % 9):
            self.advance()
        self.trace.append(f"step {1 + a % 9} times")

    def do_finish(self, a: int, *_: int) -> None:
        if self.asked:
            self.conclude(self.asked[a % len(self.asked)])

    def do_cancel(self, a: int, *_: int) -> None:
        if not self.asked:
            return
        one = self.asked.pop(a % len(self.asked))
        state = "running" if one.seq in self.engine.scheduler.running else "waiting" if not one.seq.finish else "ended"
        pending = len(one.seq.pending)
        one.stream.close()
        self.trace.append(f"cancel {one.seq.id} ({state}, {pending} tokens on their way)")
        self.tally[f"cancels of {state} requests"] += 1
        self.tally["cancels with tokens in the air"] += bool(pending)
        self.judge.check(one.seq, f"cancelled request {one.seq.id}")
        self.texts.append(tuple(one.seq.tokens))

    def conclude(self, one: Asked) -> None:
        """Run until a request has ended, and judge it."""
        seq = one.seq
        while not seq.finish:
            invariants.require(self.advance(), f"nothing is left to do and request {seq.id} has not ended")
        events = list(one.stream)
        self.asked.remove(one)
        said = [e.token for e in events]
        self.trace.append(f"request {seq.id} ended ({seq.finish}, {seq.cached} cached): {said}")
        invariants.require(said == seq.tokens[len(seq.prompt) :], f"request {seq.id}: events and tokens differ")
        self.judge.check(seq, f"request {seq.id}")
        self.judge.check_logprobs(seq, [e.logprobs for e in events], f"request {seq.id}")
        self.check_end(seq, len(said))
        self.tally["requests with cached tokens"] += bool(seq.cached)
        self.texts.append(tuple(seq.tokens))

    def check_end(self, seq: Sequence, n: int) -> None:
        stopped = seq.tokens[-1] in seq.stops
        full = n == seq.params.max_tokens or len(seq.tokens) == self.engine.context
        invariants.require(seq.finish == ("stop" if stopped else "length"), f"request {seq.id} ended as {seq.finish}")
        invariants.require(stopped or full, f"request {seq.id} ended after {n} of {seq.params.max_tokens} tokens")
        self.tally[f"ended by {seq.finish}"] += 1

    # The store, and starting again

    def do_evict(self, a: int, b: int, *_: int) -> None:
        groups = self.engine.groups
        pool = groups[b % len(groups)].pool if b % 3 else None
        gone = sum(self.engine.store.evict(pool) for _ in range(1 + a % 8))
        self.tally["evictions by hand"] += gone
        self.trace.append(f"evict {gone} nodes")

    def do_clear(self, *_: int) -> None:
        self.engine.store.clear()
        self.tally["clears"] += 1
        self.trace.append("clear the store")

    def do_reboot(self, a: int, b: int, *_: int) -> None:
        """Another engine of the same model; what was saved is restored into it."""
        while self.asked:
            self.do_cancel(0)
        self.wind_up()
        self.engine.close()
        self.engine = self.start(a % 4, 1 + b)
        self.tally["restarts"] += 1
        for path in list(self.saved):
            self.restore(path)


def explain(program: Program, machine: Machine | None, error: BaseException) -> str:
    """A failure in full: the program, what it did, what went wrong."""
    done = machine.trace if machine else []
    kind = "typed error" if isinstance(error, MlxrtError) else type(error).__name__
    return f"{program}\nwhat was done:\n  " + "\n  ".join(done) + f"\n{kind}: {error}"
