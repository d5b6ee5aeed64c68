"""Runs a program on an engine and checks every token: requests, steps, cancels, evictions, restarts.

Operations on values (states.py) and on conversations (conversations.py) are mixed in from their own files. The machine
keeps a trace in words: a failure shows what was done, not the numbers it was made of.
"""

from dataclasses import dataclass
from pathlib import Path

from mlxrt import ContextOverflow
from mlxrt.engine.output import RequestStream
from mlxrt.engine.sequence import Sequence
from mlxrt.errors import MlxrtError

from . import invariants, kinds
from .checker import Checker, asked
from .conversations import ConversationOps
from .program import Program
from .states import StateOps


@dataclass
class Asked:
    """A request under way."""

    stream: RequestStream
    seq: Sequence


class Machine(StateOps, ConversationOps):
    def __init__(self, program: Program, checker: Checker, folder: Path):
        super().__init__(program, checker, folder)
        self.asked: list[Asked] = []
        self.held_answers: list[tuple[int, tuple[int, ...]]] = []  # of a form: tokens of the prompt, and all

    def run(self) -> None:
        for name, *numbers in self.program.ops:
            getattr(self, f"do_{name}")(*numbers)
            invariants.check(self.engine)
        self.wind_up()
        self.tally["programs"] += 1
        self.tally["programs with answers held to a form"] += bool(self.held_answers)

    def wind_up(self) -> None:
        """Let everything end, check it, drop it, and see that nothing is left."""
        while self.asked:
            self.conclude(self.asked[0])
        while self.advance():
            continue
        self.note_totals()
        self.holds.clear()
        self.sessions.clear()
        self.store.clear()
        # A copy promised to a growth that then found no room is made, and forgotten, by the next step.
        self.engine.core.runner.flush()
        self.engine.core.pools.apply_pending()
        invariants.check_empty(self.engine)

    def note_totals(self) -> None:
        stats = self.engine.stats()
        self.tally["evictions"] += stats.evictions
        self.tally["preemptions"] += stats.preemptions
        self.tally["prefix hits"] += stats.hits
        self.tally["steps waited for"] += self.engine.core.runner.waits
        self.tally["blocks poisoned"] += self.poison.filled if self.poison else 0

    # Requests

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
        seq = self.engine.core.outputs.states[stream.ids[0]].seq
        self.trace.append(f"submit {seq.id}: {len(prompt)} tokens {list(prompt)}, {n} wanted, mood {mood % 64}")
        self.asked.append(Asked(stream, seq))
        self.tally["submits"] += 1
        self.tally["requests that part inside an answer held to a form"] += self.parts_inside(prompt)

    def do_step(self, a: int, *_: int) -> None:
        for _i in range(1 + a % 9):
            self.advance()
        self.trace.append(f"step {1 + a % 9} times")

    def do_finish(self, a: int, *_: int) -> None:
        if self.asked:
            self.conclude(self.asked[a % len(self.asked)])

    def do_cancel(self, a: int, *_: int) -> None:
        if not self.asked:
            return
        one = self.asked.pop(a % len(self.asked))
        state = (
            "running" if one.seq in self.engine.core.scheduler.running else "waiting" if not one.seq.finish else "ended"
        )
        pending = len(one.seq.pending)
        one.stream.close()
        self.trace.append(f"cancel {one.seq.id} ({state}, {pending} tokens on their way)")
        self.tally[f"cancels of {state} requests"] += 1
        self.tally["cancels with tokens in the air"] += bool(pending)
        self.tally["cancels of answers held to a form"] += one.seq.request.response_format is not None
        self.checker.check(one.seq, f"cancelled request {one.seq.id}")
        self.remember(one.seq)

    def conclude(self, one: Asked) -> None:
        """Run until a request has ended, and check it."""
        seq = one.seq
        while not seq.finish:
            invariants.require(self.advance(), f"nothing is left to do and request {seq.id} has not ended")
        events = list(one.stream)
        self.asked.remove(one)
        if seq.finish == "error":
            self.give_way(seq, events[-1].error, held=False)
        reason = events[-1].finish_reason
        events = [e for e in events if e.token is not None]  # others have text that was held back
        said = [e.token for e in events]
        self.trace.append(f"request {seq.id} ended ({seq.finish}, {seq.cached} cached): {said}")
        invariants.require(said == seq.tokens[len(seq.prompt) :], f"request {seq.id}: events and tokens differ")
        self.checker.check(seq, f"request {seq.id}")
        self.checker.check_logprobs(seq, [e.logprobs for e in events], f"request {seq.id}")
        self.check_end(seq, len(said), reason)
        self.tally["requests with cached tokens"] += bool(seq.cached)
        self.remember(seq)

    def remember(self, seq: Sequence) -> None:
        """Later prompts begin like it."""
        self.prompts.append(tuple(seq.tokens))
        if seq.request.response_format is not None:
            self.held_answers.append((len(seq.prompt), tuple(seq.tokens)))

    def parts_inside(self, prompt: tuple[int, ...]) -> bool:
        """Whether a prompt goes back into an answer that was held to a form, and goes on from there otherwise."""
        common = ((begin, len(tokens), common_length(prompt, tokens)) for begin, tokens in self.held_answers)
        return any(begin < n < end for begin, end, n in common)

    def check_end(self, seq: Sequence, n: int, reason: str | None) -> None:
        if reason == "error":
            return
        invariants.require(not self.overflows(seq.prompt), f"request {seq.id} overflows and was answered")
        stopped = seq.tokens[-1] in seq.stops or self.checker.completed.get(seq.id, False) or self.hits_stop(seq)
        full = n == seq.params.max_tokens or len(seq.tokens) == self.engine.context
        invariants.require(reason == ("stop" if stopped else "length"), f"request {seq.id} ended as {reason}")
        invariants.require(stopped or full, f"request {seq.id} ended after {n} of {seq.params.max_tokens} tokens")
        self.tally[f"ended by {reason}"] += 1

    def hits_stop(self, seq: Sequence) -> bool:
        text = kinds.tokenizer().decode(seq.tokens[len(seq.prompt) :])
        hit = any(stop in text for stop in seq.params.stop)
        self.tally["forms cut by a stop string"] += hit
        return hit

    # The store, and starting again

    def do_evict(self, a: int, b: int, *_: int) -> None:
        groups = self.engine.core.pools.groups
        pool = groups[b % len(groups)].pool if b % 3 else None
        gone = sum(self.store.evict(pool) for _ in range(1 + a % 8))
        self.tally["evictions by hand"] += gone
        self.trace.append(f"evict {gone} nodes")

    def do_clear(self, *_: int) -> None:
        self.store.clear()
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


def common_length(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def explain(program: Program, machine: Machine | None, error: BaseException) -> str:
    """A failure in full: the program, what it did, what went wrong."""
    done = machine.trace if machine else []
    kind = "typed error" if isinstance(error, MlxrtError) else type(error).__name__
    return f"{program}\nwhat was done:\n  " + "\n  ".join(done) + f"\n{kind}: {error}"
