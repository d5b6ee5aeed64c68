"""Plays a load on an engine step by step and has everything judged: tokens, ends, waits, what is left.

Time is counted in steps, so deadlines and ageing are part of the program. What streams waited for is counted here, from
the steps that were launched, not taken from the engine's own books.
"""

from collections import Counter
from dataclasses import dataclass, field

from mlxrt import BadLogits, ContextOverflow, Engine, EngineConfig, EngineEvent, Event, WontFit
from mlxrt.engine.output import RequestStream
from mlxrt.engine.sequence import Sequence, Step
from tests.support.poison import Poison
from tests.support.state_machine import invariants, kinds
from tests.support.state_machine.checker import Checker
from tests.support.state_machine.invariants import require

from .program import Arrival, Program

PATIENCE = 6000  # steps


@dataclass
class Guest:
    """A request under way."""

    arrival: Arrival
    stream: RequestStream
    seq: Sequence
    events: list[Event] = field(default_factory=list)
    left: bool = False


class Play:
    def __init__(self, program: Program, checker: Checker):
        self.program, self.checker, self.tally = program, checker, checker.tally
        self.guests: list[Guest] = []
        self.ends: Counter[int] = Counter()
        self.now = 0
        self.prompted = 0  # prompt tokens launched so far
        self.seen: dict[Sequence, tuple[int, int]] = {}  # that count at its last token, and its preemptions then
        self.engine = self.start()

    def start(self) -> Engine:
        p = self.program
        config = EngineConfig(
            chunk=p.chunk,
            max_running=p.running,
            ahead=p.ahead,
            kv_memory=kinds.memory_for(p.kind, p.capacity),
            max_stall=None if p.alone else p.stall,
            deterministic=p.alone,
            compile=p.compiled,
            prefix_cache=p.reuse,
        )
        engine = Engine(kinds.engine_model(p.kind), config, kinds.tokenizer(), on_event=self.record_event)
        engine.core.scheduler.clock = lambda: float(self.now)
        launch = engine.core.runner.launch

        def counted(step: Step):
            self.count(step)
            return launch(step)

        engine.core.runner.launch = counted  # type: ignore[method-assign]
        self.poison = Poison(engine) if kinds.is_poisoned(p.kind) else None
        return engine

    @property
    def bound(self) -> int:
        return self.program.chunk if self.program.stall is None or self.program.alone else self.program.stall

    def record_event(self, event: EngineEvent) -> None:
        self.ends[event.id] += event.kind == "finished"

    def count(self, step: Step) -> None:
        """What every stream of a step has waited for since its last token."""
        work = [(s, s.stop - s.start) for s in step.slices]
        tokens = [n for s, n in work if n > 1 or s.start < len(s.seq.prompt) or not s.samples]
        back = sum(n == 1 and s.seq.preempted > 0 for s, n in work)  # they may count as prompts until they go on
        message = f"{sum(tokens)} prompt tokens in a step that says {step.prefill_tokens}"
        require(0 <= step.prefill_tokens - sum(tokens) <= back, message)
        require(len({s.seq for s, _ in work}) == len(work), "a sequence is in a step twice")
        singles = [n == 1 for _, n in work]
        require(singles == sorted(singles, reverse=True), "rows of one token do not come first")
        self.prompted += sum(tokens)
        require(len(work) == 1 or not self.program.alone, "two sequences in a step")
        for s, _ in work:
            if not s.samples:
                continue
            at, preempted = self.seen.get(s.seq, (self.prompted, s.seq.preempted))
            if preempted == s.seq.preempted:  # otherwise it was not running: its memory was needed
                require(self.prompted - at <= self.bound, f"request {s.seq.id} waited for {self.prompted - at} tokens")
                self.tally["waits judged"] += s.seq in self.seen
                self.tally["waits with prompts between"] += self.prompted > at
            self.seen[s.seq] = self.prompted, s.seq.preempted

    def run(self) -> None:
        arrivals = list(self.program.arrivals)
        while arrivals or not all(g.left or g.seq.finish for g in self.guests):
            while arrivals and arrivals[0].at <= self.now:
                self.receive(arrivals.pop(0))
            for guest in self.guests:
                if guest.arrival.cancel is not None and guest.arrival.cancel <= self.now:
                    self.part(guest)
            moved = self.engine.step()
            invariants.check(self.engine)
            self.now += 1
            waits = arrivals or any(g.arrival.cancel is not None and not g.left for g in self.guests)
            require(moved or bool(waits) or self.over(), "nothing moves and somebody waits")
            require(self.now < PATIENCE, "it takes for ever")
        self.close()

    def over(self) -> bool:
        return all(g.left or g.seq.finish for g in self.guests)

    def receive(self, arrival: Arrival) -> None:
        prompt = arrival.request.tokens or ()
        try:
            stream = self.engine.stream(arrival.request)
        except (ContextOverflow, WontFit):
            require(len(prompt) >= self.engine.context, f"{len(prompt)} tokens refused")
            self.tally["prompts refused"] += 1
            return
        self.guests.append(Guest(arrival, stream, self.engine.core.outputs.states[stream.ids[0]].seq))
        self.tally["requests"] += 1

    def part(self, guest: Guest) -> None:
        """Its reader leaves, or it is cancelled by its number."""
        if guest.left or guest.seq.finish:
            return
        state = "running" if guest.seq in self.engine.core.scheduler.running else "waiting"
        self.tally[f"cancels of {state} requests"] += 1
        if guest.arrival.by_id:
            self.engine.cancel(guest.seq.id)
        else:
            guest.stream.close()
            guest.left = True

    def close(self) -> None:
        while self.engine.step():
            continue
        for guest in self.guests:
            guest.events = list(guest.stream)
            self.check(guest)
        stats = self.engine.stats()
        require(not stats.longest_stall or stats.preemptions > 0 or stats.longest_stall <= self.bound, f"{stats}")
        require(not stats.preemptions or not self.program.alone, "one gave way though each had room to its end")
        for name, n in (("preemptions", stats.preemptions), ("evictions", stats.evictions), ("hits", stats.hits)):
            self.tally[name] += n
        if self.engine.core.prefix_cache is not None:
            self.engine.core.prefix_cache.clear()
        self.engine.core.runner.flush()
        self.engine.core.pools.apply_pending()
        invariants.check_empty(self.engine)
        self.engine.close()
        self.tally["programs"] += 1
        self.tally["blocks poisoned"] += self.poison.filled if self.poison else 0
        self.tally["compiled programs"] += self.program.compiled
        self.tally["deterministic programs"] += self.program.alone

    def check(self, guest: Guest) -> None:
        seq, what = guest.seq, f"request {guest.seq.id}"
        require(self.ends[seq.id] == 1, f"{what} ended {self.ends[seq.id]} times")
        finals = [e.finish_reason for e in guest.events if e.finish_reason]
        require(finals == ([] if guest.left else [seq.finish]), f"{what}: last events {finals}, ended as {seq.finish}")
        self.checker.check(seq, what)
        said = seq.tokens[len(seq.prompt) :]
        if not guest.left:
            given = [e for e in guest.events if e.token is not None]
            require([e.token for e in given] == said, f"{what}: events and tokens differ")
            require(guest.events[-1].finish_reason is not None, f"{what}: an event after the last")
            self.checker.check_logprobs(seq, [e.logprobs for e in given], what)
        self.check_reason(guest, len(said))
        self.tally[f"ended by {seq.finish}"] += 1
        self.tally["preempted requests"] += bool(seq.preempted)
        self.tally["requests that waited for a prefix"] += seq.followed

    def check_reason(self, guest: Guest, n: int) -> None:
        seq, reason = guest.seq, str(guest.seq.finish)
        overflows = kinds.is_poisoned(self.program.kind) and kinds.OVERFLOW in seq.tokens
        require(not n or kinds.OVERFLOW not in seq.prompt, f"request {seq.id} overflows and said {n} tokens")
        stopped = n > 0 and seq.tokens[-1] in seq.stops
        full = n == seq.params.max_tokens or len(seq.tokens) == self.engine.context
        right = {
            "stop": stopped,
            "length": full and not stopped,
            "error": overflows and (guest.left or isinstance(guest.events[-1].error, BadLogits)),
            "cancelled": guest.arrival.cancel is not None,
            "deadline": seq.deadline is not None and self.now >= seq.deadline,
        }
        error = f": {guest.events[-1].error}" if reason == "error" and guest.events else ""
        require(right.get(reason, False), f"request {seq.id} ended as {reason} after {n} tokens{error}")
        if self.poison:
            self.tally["requests that overflowed"] += reason == "error"
            self.tally["others beside poisoned memory"] += reason in ("stop", "length")
