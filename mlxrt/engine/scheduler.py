"""Who runs next. Owns every sequence from submission to finish. Imports no mlx.

There is no prefill phase and no decode phase: a sequence has tokens, memory that holds some of them, and the
scheduler lets the memory catch up: running streams first, then prompts, cut wherever the step's budget ends.
"""

import heapq
import time
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from ..cache import LayerState, PrefixCache
from ..errors import ContextOverflow, MlxrtError, QueueFull, WontFit
from .inflight_prefixes import Underway
from .kv_allocator import Room
from .request import Finish, Request, Sequence
from .step import Slice, Step
from .waiting_queue import WaitingLine


@dataclass(frozen=True)
class Limits:
    running: int = 32
    chunk: int = 512  # tokens in a step
    length: int = 4096  # tokens of a sequence, prompt and output
    max_step: int = 1 << 30  # tokens of one sequence in a step
    queue: int = 4096  # requests that may wait
    stall: int | None = None  # prompt tokens between two tokens of a running stream (None: one chunk)
    age: float = 10.0  # seconds of waiting that are worth one step of priority
    alone: bool = False  # every sequence takes the steps it would take if there were no other


class Scheduler(Room):
    def __init__(
        self,
        empty: Callable[[], tuple[LayerState, ...]],
        store: PrefixCache | None,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__(empty, store)
        self.limits, self.clock = limits, clock
        self.waiting = WaitingLine(limits.age)
        self.running: dict[Sequence, None] = {}  # in the order they were admitted
        self.streams: dict[Sequence, None] = {}  # of them, those that decode
        self.prompts: list[Sequence] = []  # and those that compute what is known, in the order of their turns
        self.preemptions = 0
        self.prompted = 0  # prompt tokens in all steps so far
        self.pace: int | None = None  # prompt tokens that take as long as a stream may wait, as far as was measured
        self.failed: list[tuple[Sequence, MlxrtError]] = []  # ended by us, not yet told to whoever asked
        self.stalls: Counter[int] = Counter()  # prompt tokens between two tokens, up to a power of two -> how often
        self.longest_stall = 0
        self.notice: Callable[[str, Sequence], None] = lambda what, seq: None
        self._underway = Underway(store.node_size) if store is not None else None
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._full = False  # there was no room for somebody: nobody is admitted until somebody ends
        self._leaving: Sequence | None = None  # gives its memory back as soon as its tokens have arrived
        self._ids = count()

    # From submission to finish

    def submit(
        self, request: Request, prompt: tuple[int, ...], stops: frozenset[int] = frozenset(), seed: int = 0
    ) -> Sequence:
        if len(prompt) >= self.limits.length:
            raise ContextOverflow(len(prompt), self.limits.length)
        if len(self.waiting) >= self.limits.queue:
            raise QueueFull(
                f"{len(self.waiting)} requests wait and {len(self.running)} run; the queue holds {self.limits.queue}: "
                "try again later, or raise max_queue"
            )
        seq, now = Sequence(next(self._ids), request, prompt, stops, seed), self.clock()
        if request.deadline_s is not None:
            seq.deadline = now + request.deadline_s
            heapq.heappush(self._deadlines, (seq.deadline, seq.id, seq))
        self.waiting.join(seq, now)
        return seq

    def finish(self, seq: Sequence, reason: Finish) -> None:
        """End a sequence now. What it has computed stays in the store."""
        if seq.finish:
            return
        seq.finish = reason
        if seq in self.running:
            self.keep(seq, whole=True)
            self._leave(seq)
        else:
            self.waiting.leave(seq)
            if self._underway is not None:
                self._underway.forget(seq)
        seq.parts, seq.stored, seq.marks = (), None, []
        self._full, self._leaving = False, None

    def expire(self) -> list[Sequence]:
        """End those whose deadline has passed."""
        ended: list[Sequence] = []
        while self._deadlines and (self._deadlines[0][2].finish or self._deadlines[0][0] <= self.clock()):
            seq = heapq.heappop(self._deadlines)[2]
            if not seq.finish:
                self.finish(seq, Finish.DEADLINE)
                ended.append(seq)
        return ended

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

    # A step

    def plan(self) -> Step | None:
        """The next step; None when nobody can move before a token arrives, or nobody is there."""
        while True:
            self._let_go()
            self._admit()
            rows, spans, marked = self._one() if self.limits.alone else self._all()
            if rows or spans:
                return self._step(rows, spans, marked)
            if not self._stuck():
                return None

    def _step(self, rows: list[Slice], spans: list[Slice], marked: bool) -> Step:
        n = sum(s.stop - s.start for s in spans)
        self.prompted += n
        for s in rows:
            self._note_stall(self.prompted - s.seq.seen)
            s.seq.seen = self.prompted
        for s in spans:
            if s.seq.decoding:
                self._end_prompt(s.seq)
                self.streams[s.seq] = None
                s.seq.seen = self.prompted
        # A long prompt may have been cut down to one token: rows of one token come first.
        spans.sort(key=lambda s: s.stop - s.start > 1)
        return Step((*rows, *spans), marked, n)

    def _all(self) -> tuple[list[Slice], list[Slice], bool]:
        """Slices of everybody who can move."""
        rows, blocked, marked = self._rows()
        if blocked is not None:
            self._leaving = self._victim()
            return rows, [], marked
        spans, more = self._spans(self._allowance(len(rows)))
        return rows, spans, marked | more

    def _one(self) -> tuple[list[Slice], list[Slice], bool]:
        """A slice of one sequence: of a prompt where no stream has to wait too long for it, else a stream's token."""
        spans, marked = self._spans(self._allowance(0))
        if spans:
            return [], spans, marked
        for seq in tuple(self.streams):
            if seq.todo and self.grow(seq, 1):
                self.streams[seq] = self.streams.pop(seq)  # the others first, the next time
                return [Slice(seq, seq.length - 1, seq.length, True)], [], self.mark(seq)
        return [], [], False

    def _note_stall(self, tokens: int) -> None:
        self.stalls[0 if tokens < 1 else 1 << (tokens - 1).bit_length()] += 1
        self.longest_stall = max(self.longest_stall, tokens)

    def _rows(self) -> tuple[list[Slice], Sequence | None, bool]:
        """One token of every stream that can take one; and one that there was no room for."""
        rows, blocked, marked = [], None, False
        for seq in self.streams:
            if not seq.todo or seq is self._leaving:
                continue
            if self.grow(seq, 1):
                rows.append(Slice(seq, seq.length - 1, seq.length, True))
                marked |= self.mark(seq)
            else:
                blocked = seq
        return rows, blocked, marked

    def _allowance(self, rows: int) -> int:
        """Prompt tokens this step may take: what the rows leave of a chunk, never more than streams can wait for."""
        most = max(self.limits.chunk - rows, 1)
        waits = [self.prompted - seq.seen for seq in self.streams if not seq.paused]
        return max(0, min(most, self.bound - max(waits))) if waits else most

    @property
    def bound(self) -> int:
        """Prompt tokens that may pass between two tokens of a stream."""
        bound = self.limits.chunk if self.limits.stall is None else self.limits.stall
        return bound if self.pace is None else max(1, min(bound, self.pace))

    def _spans(self, budget: int) -> tuple[list[Slice], bool]:
        spans, marked = [], False
        for seq, n in self._shares(budget).items():
            todo = seq.todo
            n = self._take(seq, n)
            if n > 0:
                spans.append(Slice(seq, seq.length - n, seq.length, n == todo))
                marked |= self.mark(seq)
        return spans, marked

    def _shares(self, budget: int) -> dict[Sequence, int]:
        """Half of the budget goes to the first in line, so that it gets done; half to the shortest, so that a question
        need not wait for a book; what is left in the order of the line."""
        line = [seq for seq in self.prompts if seq.todo and seq is not self._leaving]
        shares: dict[Sequence, int] = {}
        if not line or budget < 1:
            return shares
        if self.limits.alone:  # cut where it would be cut without the others
            size = min(self.limits.chunk, self.limits.max_step)
            n = min(line[0].todo, size - line[0].length % size)
            return {line[0]: n} if n <= budget else {}
        first = line[0]
        budget -= share(shares, first, budget - budget // 2, self.limits.max_step)
        if len(line) > 1:
            urgent = [seq for seq in line if seq.request.priority >= first.request.priority]
            for seq in [*sorted(urgent, key=lambda seq: seq.todo), *line]:
                budget -= share(shares, seq, budget, self.limits.max_step)
                if not budget:
                    break
        else:
            share(shares, first, budget, self.limits.max_step)
        return shares

    # Who is let in

    def _admit(self) -> None:
        self._call_followers()
        while self.waiting and self._has_slot():
            seq = self.waiting.next()
            if seq is None:
                return  # all who wait do so for a prefix or a reader
            if seq.paused or self._follows(seq):
                self.waiting.hold(seq)
            elif self.running and not self._has_room(seq):
                self.waiting.rejoin(seq)
                self._full = True
            else:
                self._begin(seq)

    def _has_slot(self) -> bool:
        """Whether one more may run. Those whose readers lag behind do not stand in the way."""
        idle = [s for s in self.running if s.paused] if self._full or len(self.running) >= self.limits.running else []
        if len(self.running) >= self.limits.running:
            idle = [s for s in idle if not s.pending]
            if not idle or self.limits.alone:
                return False
            self._preempt(idle[-1])
            self._full = False
        return not (self._full and len(self.running) > len(idle))

    def pause(self, seq: Sequence) -> None:
        """No more tokens until `resume`: whoever reads them lags behind."""
        seq.paused = True

    def resume(self, seq: Sequence) -> None:
        seq.paused = False
        if seq in self.waiting:
            self.waiting.rejoin(seq)

    def _begin(self, seq: Sequence) -> None:
        seq.parts, seq.length = self.empty(), 0
        if self.store is not None and (state := self.store.resume(seq.tokens)):
            seq.parts, seq.length = state.parts, len(state)
            if not seq.admitted:
                seq.cached = len(state)
        seq.admitted = True
        self.running[seq] = None
        insort(self.prompts, seq, key=by_turn)
        if self._underway is not None:
            self._underway.claim(seq)
        self.notice("started", seq)

    def _follows(self, seq: Sequence) -> bool:
        """Whether it waits for a prefix that somebody else computes."""
        if self._underway is None or self.store is None:
            return False
        return self._underway.wait(seq, len(self.store.full_nodes(seq.prompt)) * self.store.node_size)

    def _call_followers(self) -> None:
        """Those whose prefix is computed by now get it out of the store."""
        if self._underway is None:
            return
        for owner, seq in self._underway.ready():
            self.keep(owner)
            self.waiting.rejoin(seq)

    def _end_prompt(self, seq: Sequence) -> None:
        """It computes no prompt any more: nobody has to wait for it."""
        del self.prompts[bisect_left(self.prompts, by_turn(seq), key=by_turn)]
        if self._underway is not None:
            for follower in self._underway.leave(seq):
                self.keep(seq)
                self.waiting.rejoin(follower)

    def _has_room(self, seq: Sequence) -> bool:
        """Whether its prompt fits beside what runs, all stored prefixes given up."""
        if self.limits.alone:
            return self._has_all_room(seq)
        need = len(seq.tokens) + 1
        for g, part in enumerate(self.empty()):
            places = part.num_blocks(need)
            if places > part.pool.available:
                live = {b.id for other in self.running for b in other.parts[g].blocks}
                if places > part.pool.limit - 1 - len(live):
                    return False
        return True

    def _has_all_room(self, seq: Sequence) -> bool:
        """Whether it fits to its very end beside the ends of what runs: nobody will have to give way."""
        ends = [min(len(s.prompt) + s.params.max_tokens, self.limits.length) for s in (*self.running, seq)]
        return all(sum(part.num_blocks(n) for n in ends) < part.pool.limit for part in self.empty())

    # Memory

    def _take(self, seq: Sequence, n: int) -> int:
        """How many of n tokens the sequence got room for. Whoever runs alone takes a smaller step rather than none."""
        while n > 0 and not self.grow(seq, n):
            n = n // 2 if len(self.running) == 1 and not self.limits.alone else 0
        return n

    def _victim(self) -> Sequence | None:
        """Who gives its memory back when there is too little: nobody reads it, or least urgent, or youngest."""
        if len(self.running) < 2 or self.limits.alone:
            return None
        return min(reversed(self.running), key=lambda s: (not s.paused, s.request.priority))

    def _let_go(self) -> None:
        """Preempt who was asked to leave, once its tokens have arrived."""
        if self._leaving is not None and not self._leaving.pending:
            self._preempt(self._leaving)

    def _stuck(self) -> bool:
        """No room for anybody and nothing on its way: somebody gives its memory back and goes on later."""
        want = [s for s in self.running if s.todo]
        if not want or any(s.pending for s in self.running):
            return False
        victim = self._victim()
        if victim is not None:
            self._preempt(victim)
        else:
            seq = want[-1]
            self.failed.append((seq, self._too_much(seq)))
            self.finish(seq, Finish.ERROR)
        return True

    def _too_much(self, seq: Sequence) -> WontFit:
        pools = ", ".join(f"{p.pool.available} of {p.pool.limit - 1} idle" for p in seq.parts)
        return WontFit(
            f"request {seq.id} has {seq.length} of {len(seq)} tokens in memory and there is no room for one more "
            f"(blocks: {pools}); let saved states go, or raise kv_memory or memory"
        )

    def _preempt(self, seq: Sequence) -> None:
        self.keep(seq, whole=True)
        self._leave(seq)
        seq.parts, seq.stored, seq.marks, seq.length = (), None, [], 0
        self.waiting.rejoin(seq)
        self._full = True
        seq.preempted += 1
        self.preemptions += 1
        self.notice("preempted", seq)

    def _leave(self, seq: Sequence) -> None:
        """Out of the running ones."""
        del self.running[seq]
        if seq in self.streams:
            del self.streams[seq]
        else:
            self._end_prompt(seq)
        self._leaving = None


def by_turn(seq: Sequence) -> tuple[float, int]:
    return seq.turn, seq.id


def share(shares: dict[Sequence, int], seq: Sequence, most: int, longest: int) -> int:
    """Give a sequence up to `most` more tokens; how many it took."""
    had = shares.get(seq, 0)
    n = min(most, min(seq.todo, longest) - had)
    if n > 0:
        shares[seq] = had + n
    return max(n, 0)
