"""The scheduler: which tokens of which sequences the next step computes. Imports no mlx.

There is no prefill phase and no decode phase: a sequence has tokens, KV blocks that hold some of them, and the
scheduler lets the blocks catch up within a token budget: decoding sequences first, then prompts in chunks.
"""

import time
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

from ..errors import ContextOverflow, MlxrtError, QueueFull, WontFit
from .kv_allocator import KVAllocator
from .queue import Deadlines, InflightPrefixes, WaitingQueue
from .request import Finish, Request
from .sequence import Sequence, Slice, Step

FIRST_STALL = 32  # prompt tokens between two tokens of a stream while their rate is not known yet


@dataclass(frozen=True)
class Limits:
    running: int = 32
    chunk: int = 512  # tokens in a step
    length: int = 4096  # tokens of a sequence, prompt and output
    queue: int = 4096  # requests that may wait
    stall: int | None = None  # prompt tokens between two tokens of a running stream (None: one chunk)
    stall_ms: float | None = None  # the same in milliseconds, by the measured prefill rate
    age: float = 10.0  # seconds of waiting that are worth one step of priority
    deterministic: bool = False  # every sequence takes the steps it would take if there were no other


class Plan(NamedTuple):
    """What `plan` decided: the next step, if any, and what happened to sequences on the way."""

    step: Step | None
    events: list[tuple[str, Sequence]]  # "started" and "preempted", in order
    failed: list[tuple[Sequence, MlxrtError]]  # finished because memory can never suffice


class Scheduler:
    """`fit_prefill`: how many of so many prompt tokens, beside so many decoding rows and with prompts that end at so
    many tokens at most, the device has memory for now, and what is short."""

    def __init__(
        self,
        allocator: KVAllocator,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
        fit_prefill: Callable[[int, int, int], tuple[int, str]] | None = None,
    ):
        self.allocator, self.limits, self.clock = allocator, limits, clock
        self.fit_prefill = fit_prefill
        self.waiting = WaitingQueue(limits.age)
        self.running: dict[Sequence, None] = {}  # in the order they were admitted
        self.decoding: dict[Sequence, None] = {}  # the running ones that decode
        self.prefilling: list[Sequence] = []  # the others, in queue order
        self._prefilled: dict[Sequence, None] = {}  # whose prefill ended with the last step
        self.preemptions = self.requests = self.prompt_tokens = self.cached_tokens = 0
        self.prefilled = 0  # prompt tokens in all steps so far
        self.stalls: Counter[int] = Counter()  # prompt tokens between two tokens, up to a power of two -> how often
        self.longest_stall = 0
        cache = allocator.cache
        self._inflight = InflightPrefixes(cache.node_size) if cache is not None else None
        self.deadlines = Deadlines()
        self._measured_stall = FIRST_STALL if limits.stall_ms is not None else None
        self._full = False  # a sequence did not fit: none is admitted until one finishes
        self._victim: Sequence | None = None  # is preempted as soon as its tokens have arrived
        self._events: list[tuple[str, Sequence]] = []
        self._ids = count()

    # From submission to finish

    def add(
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
            self.deadlines.add(seq, seq.deadline)
        self.waiting.add(seq, now)
        return seq

    def finish(self, seq: Sequence, reason: Finish) -> None:
        """End a sequence now. What it has computed stays in the prefix cache."""
        if seq.finish:
            return
        seq.finish = reason
        self.deadlines.discard(seq)
        if seq in self.running:
            self.allocator.cache_prefix(seq, partial=True)
            self._remove_running(seq)
        else:
            self.waiting.remove(seq)
            if self._inflight is not None:
                self._inflight.unfollow(seq)
        seq.parts, seq.stored, seq.checkpoints = (), None, []
        self._full, self._victim = False, None

    def expire(self) -> list[Sequence]:
        """Sequences whose deadline has passed, for the caller to finish."""
        return self.deadlines.pop_expired(self.clock())

    def commit(self, s: Slice, token: int, complete: bool = False) -> bool:
        """A sampled token has arrived; `complete`: nothing may follow it. False when its sequence was finished while
        the step was running."""
        seq = s.seq
        if seq.finish:
            return False
        seq.pending.pop(0)
        seq.tokens.append(token)
        if complete or token in seq.stops:
            self.finish(seq, Finish.STOP)
        elif len(seq.tokens) - len(seq.prompt) >= seq.params.max_tokens or len(seq.tokens) >= self.limits.length:
            self.finish(seq, Finish.LENGTH)
        return True

    def pause(self, seq: Sequence) -> None:
        """No more tokens until `resume`: the reader lags behind."""
        seq.paused = True

    def resume(self, seq: Sequence) -> None:
        seq.paused = False
        if seq in self.waiting:
            self.waiting.requeue(seq)

    # A step

    def plan(self) -> Plan:
        """The next step; none when all sequences wait for tokens that are still on the device."""
        step: Step | None = None
        failed: list[tuple[Sequence, MlxrtError]] = []
        while True:
            self._preempt_victim()
            self._admit()
            rows, chunks, checkpoint = self._plan_one() if self.limits.deterministic else self._plan_all()
            if rows or chunks:
                step = self._make_step(rows, chunks, checkpoint)
                break
            if not self._free_memory(failed):
                break
        events, self._events = self._events, []
        return Plan(step, events, failed)

    def _make_step(self, rows: list[Slice], chunks: list[Slice], checkpoint: bool) -> Step:
        n = sum(s.stop - s.start for s in chunks)
        self.prefilled += n
        for s in rows:
            self._record_stall(self.prefilled - s.seq.seen)
            s.seq.seen = self.prefilled
        for s in chunks:
            if s.seq.decoding:
                self._remove_prefilling(s.seq)
                self._prefilled[s.seq] = None
                self.decoding[s.seq] = None
                s.seq.seen = self.prefilled
        # A long prompt may have been cut down to one token: rows of one token come first.
        chunks.sort(key=lambda s: s.stop - s.start > 1)
        return Step((*rows, *chunks), checkpoint, n)

    def _plan_all(self) -> tuple[list[Slice], list[Slice], bool]:
        """Slices of every sequence that can go on."""
        rows, blocked, checkpoint = self._decode_rows()
        if blocked is not None:
            self._victim = self._choose_victim()
            return rows, [], checkpoint
        chunks, more = self._prefill_chunks(self._prefill_budget(len(rows)))
        return rows, chunks, checkpoint | more

    def _plan_one(self) -> tuple[list[Slice], list[Slice], bool]:
        """A slice of one sequence: a prompt's chunk where no stream has to wait too long for it, else one token."""
        chunks, checkpoint = self._prefill_chunks(self._prefill_budget(0))
        if chunks:
            return [], chunks, checkpoint
        for seq in tuple(self.decoding):
            if seq.todo and self.allocator.grow(seq, 1):
                self.decoding[seq] = self.decoding.pop(seq)  # round robin
                return [Slice(seq, seq.length - 1, seq.length, True)], [], self.allocator.checkpoint(seq)
        return [], [], False

    def _record_stall(self, tokens: int) -> None:
        self.stalls[0 if tokens < 1 else 1 << (tokens - 1).bit_length()] += 1
        self.longest_stall = max(self.longest_stall, tokens)

    def _decode_rows(self) -> tuple[list[Slice], Sequence | None, bool]:
        """One token of every decoding sequence that can take one; and one that there was no memory for."""
        rows, blocked, checkpoint, allocator = [], None, False, self.allocator
        for seq in self.decoding:
            if not seq.todo or seq is self._victim:
                continue
            if allocator.grow(seq, 1):
                rows.append(Slice(seq, seq.length - 1, seq.length, True))
                checkpoint |= allocator.checkpoint(seq)
            else:
                blocked = seq
        return rows, blocked, checkpoint

    def _prefill_budget(self, rows: int) -> int:
        """Prompt tokens this step may take: what the rows leave of a chunk, within the stall bound of every stream."""
        most = max(self.limits.chunk - rows, 1)
        waits = [self.prefilled - seq.seen for seq in self.decoding if not seq.paused]
        return max(0, min(most, self.stall_bound - max(waits))) if waits else most

    @property
    def stall_bound(self) -> int:
        """Prompt tokens that may be computed between two tokens of a stream."""
        bound = self.limits.chunk if self.limits.stall is None else self.limits.stall
        return bound if self._measured_stall is None else max(1, min(bound, self._measured_stall))

    def set_prefill_rate(self, tokens_per_second: float) -> None:
        """The measured rate, which turns `stall_ms` into tokens."""
        if self.limits.stall_ms is not None:
            self._measured_stall = int(tokens_per_second * self.limits.stall_ms / 1e3)

    def _prefill_chunks(self, budget: int) -> tuple[list[Slice], bool]:
        chunks, checkpoint = [], False
        if self.fit_prefill is not None and budget > 0 and self.prefilling:
            context = max(seq.length + min(seq.todo, budget) for seq in self.prefilling)
            budget, short = self.fit_prefill(budget, len(self.decoding), context)
            self.allocator.shortage = short or self.allocator.shortage
        for seq, n in self._share_budget(budget).items():
            todo = seq.todo
            n = self._grow_by(seq, n)
            if n > 0:
                chunks.append(Slice(seq, seq.length - n, seq.length, n == todo))
                checkpoint |= self.allocator.checkpoint(seq)
        return chunks, checkpoint

    def _share_budget(self, budget: int) -> dict[Sequence, int]:
        """Half of the budget goes to the first prompt, so that it gets done; half to the shortest, so that a question
        need not wait for a book; the remainder in queue order."""
        line = [seq for seq in self.prefilling if seq.todo and seq is not self._victim]
        shares: dict[Sequence, int] = {}
        if not line or budget < 1:
            return shares
        if self.limits.deterministic:  # cut where it would be cut without the others
            size = self.limits.chunk
            n = min(line[0].todo, size - line[0].length % size)
            return {line[0]: n} if n <= budget else {}
        first = line[0]
        budget -= add_share(shares, first, budget - budget // 2)
        if len(line) > 1:
            urgent = [seq for seq in line if seq.request.priority >= first.request.priority]
            for seq in [*sorted(urgent, key=lambda seq: seq.todo), *line]:
                budget -= add_share(shares, seq, budget)
                if not budget:
                    break
        else:
            add_share(shares, first, budget)
        return shares

    def _grow_by(self, seq: Sequence, n: int) -> int:
        """How many of n tokens were allocated. A sequence that runs alone takes a smaller step rather than none."""
        while n > 0 and not self.allocator.grow(seq, n):
            n = n // 2 if len(self.running) == 1 and not self.limits.deterministic else 0
        return n

    # Admission

    def _admit(self) -> None:
        self._requeue_followers()
        while self.waiting and self._has_slot():
            seq = self.waiting.pop()
            if seq is None:
                return  # all that wait are parked
            if seq.paused or self._follows(seq):
                self.waiting.park(seq)
            elif self.running and not self._fits(seq):
                self.waiting.requeue(seq)
                self._full = True
            else:
                self._start(seq)

    def _has_slot(self) -> bool:
        """Whether one more sequence may run. Paused ones do not count: they are preempted."""
        idle = [s for s in self.running if s.paused] if self._full or len(self.running) >= self.limits.running else []
        if len(self.running) >= self.limits.running:
            idle = [s for s in idle if not s.pending]
            if not idle or self.limits.deterministic:
                return False
            self._preempt(idle[-1])
            self._full = False
        return not (self._full and len(self.running) > len(idle))

    def _fits(self, seq: Sequence) -> bool:
        if not self.limits.deterministic:
            return self.allocator.fits(seq, self.running)
        limit = self.limits.length
        lengths = [min(len(s.prompt) + s.params.max_tokens, limit) for s in (*self.running, seq)]
        return self.allocator.fits_to_end(lengths, self.limits.chunk)

    def _start(self, seq: Sequence) -> None:
        seq.parts, seq.length = self.allocator.empty(), 0
        cache = self.allocator.cache
        state = cache.resume(seq.tokens, seq.request.cache_salt) if cache is not None else None
        if state:
            seq.parts, seq.length = state.parts, len(state)
        if not seq.admitted:
            seq.cached = seq.length
            self.requests += 1
            self.prompt_tokens += len(seq.prompt)
            self.cached_tokens += seq.cached
        seq.admitted = True
        self.running[seq] = None
        insort(self.prefilling, seq, key=queue_order)
        if self._inflight is not None:
            self._inflight.claim(seq)
        self._events.append(("started", seq))

    def _follows(self, seq: Sequence) -> bool:
        """Whether it waits for a prefix that another sequence computes."""
        cache = self.allocator.cache
        if self._inflight is None or cache is None:
            return False
        stored = cache.full_nodes(seq.prompt, seq.request.cache_salt)
        return self._inflight.follow(seq, len(stored) * cache.node_size)

    def _requeue_followers(self) -> None:
        """Followers whose prefix is computed, and known to be finite, resume it from the prefix cache."""
        if self._inflight is None:
            return
        for owner, seq in self._inflight.pop_ready():
            self.allocator.cache_prefix(owner)
            self.waiting.requeue(seq)
        for owner in [seq for seq in self._prefilled if seq.unchecked >= seq.length]:
            self._release_followers(owner)

    def _release_followers(self, owner: Sequence) -> None:
        """A sequence computes nothing more of its prompt: nobody waits for it."""
        self._prefilled.pop(owner, None)
        if self._inflight is not None:
            for follower in self._inflight.release(owner):
                self.waiting.requeue(follower)

    def _remove_prefilling(self, seq: Sequence) -> None:
        del self.prefilling[bisect_left(self.prefilling, queue_order(seq), key=queue_order)]

    # Preemption

    def _choose_victim(self) -> Sequence | None:
        """The sequence to preempt when memory is short: a paused one, or the least urgent, or the youngest."""
        if len(self.running) < 2 or self.limits.deterministic:
            return None
        return min(reversed(self.running), key=lambda s: (not s.paused, s.request.priority))

    def _preempt_victim(self) -> None:
        """Preempt the victim once its tokens have arrived."""
        if self._victim is not None and not self._victim.pending:
            self._preempt(self._victim)

    def _free_memory(self, failed: list[tuple[Sequence, MlxrtError]]) -> bool:
        """Nothing fits and nothing is in flight: preempt a sequence, or fail one. False if there was no need."""
        blocked = [s for s in self.running if s.todo]
        if not blocked or any(s.pending for s in self.running):
            return False
        victim = self._choose_victim()
        if victim is not None:
            self._preempt(victim)
        else:
            seq = blocked[-1]
            failed.append((seq, out_of_memory(seq, self.allocator.shortage)))
            self.finish(seq, Finish.ERROR)
        return True

    def _preempt(self, seq: Sequence) -> None:
        self.allocator.cache_prefix(seq, partial=True)
        self._remove_running(seq)
        seq.parts, seq.stored, seq.checkpoints, seq.length = (), None, [], 0
        self.waiting.requeue(seq)
        self._full = True
        seq.preempted += 1
        self.preemptions += 1
        self._events.append(("preempted", seq))

    def _remove_running(self, seq: Sequence) -> None:
        del self.running[seq]
        if seq in self.decoding:
            del self.decoding[seq]
        else:
            self._remove_prefilling(seq)
        self._release_followers(seq)
        self._victim = None

    def stats(self) -> dict[str, Any]:
        """The scheduler's part of `Stats`."""
        return dict(
            running=len(self.running),
            waiting=len(self.waiting),
            preemptions=self.preemptions,
            chunk=self.limits.chunk,
            requests=self.requests,
            cached_share=self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0,
            stall_bound=self.stall_bound,
            longest_stall=self.longest_stall,
            stalls=dict(sorted(self.stalls.items())),
        )


def queue_order(seq: Sequence) -> tuple[float, int]:
    return seq.queue_key, seq.id


def add_share(shares: dict[Sequence, int], seq: Sequence, most: int) -> int:
    """Give a sequence up to `most` more tokens; how many it took."""
    had = shares.get(seq, 0)
    n = min(most, seq.todo - had)
    if n > 0:
        shares[seq] = had + n
    return max(n, 0)


def out_of_memory(seq: Sequence, shortage: str) -> WontFit:
    return WontFit(
        f"request {seq.id} has {seq.length} of {len(seq)} tokens in memory and there is no room for its next step "
        f"({shortage}); let saved states go, or raise kv_memory or memory"
    )
