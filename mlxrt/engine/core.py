"""The loop under the engine: memory, steps, and the life of every request from its ticket to its last event.

Threads come in turns, and each works on the loop's own stream: MLX gives every thread another, and what one has left
undone there no other can compute. Knows nothing of prompts, text or conversations.
"""

import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Self

import mlx.core as mx

from ..cache import LayerState, PrefixCache
from ..cache.memory import KVPools, choose, plan
from ..cache.storage import DiskStore
from ..config import EngineConfig, nbytes
from ..errors import BadRequest, EngineClosed, EngineFailed, WontFit
from ..kernels import device
from ..models import CausalLM
from ..text import Tokenizer
from ..weights.identity import identify
from . import chunk_size as pace
from . import stream_pool as lane
from .event_dispatcher import Desk
from .event_hook import Watch
from .fair_lock import Turns
from .interrupt import StepInterrupt
from .memory import MlxLimits, buffers, check_buffers, divide
from .metrics import Metrics
from .model_runner import Flight, Runner
from .request import EngineEvent, Event, Finish, Logprobs, Request, Sequence
from .scheduler import Limits, Scheduler
from .step import Slice, Step

log = logging.getLogger("mlxrt")

FIRST_PACE = 32  # prompt tokens a step while nobody knows how long they take
FIXED_CHUNK = 512  # tokens of a prompt in a step where that may not depend on the machine


@dataclass(frozen=True)
class Source:
    """Where the model came from, as far as the engine must know."""

    name: str = ""
    files: tuple[Path, ...] = ()
    eos: frozenset[int] = frozenset()
    generation: tuple[tuple[str, Any], ...] = ()  # sampling defaults the model's authors give


class StepLoop:
    def __init__(
        self,
        model: CausalLM,
        config: EngineConfig = EngineConfig(),  # noqa: B008  frozen
        tokenizer: Tokenizer | None = None,
        source: Source = Source(),  # noqa: B008  frozen
        on_event: Callable[[EngineEvent], None] | None = None,
    ):
        self.model, self.config, self.source, self._tokenizer = model, config, source, tokenizer
        self._turns, self._lane = Turns(), lane.borrow()
        self._return_lane = weakref.finalize(self, lane.give_back, self._lane)  # at the latest when nobody holds us
        self._desk, self.metrics, self._watch = Desk(self.step), Metrics(), Watch(on_event)
        self._tickets = self._desk.tickets
        self._flights: list[Flight] = []
        self._numbers = count(-1, -1)
        self._identity: dict[str, str] | None = None
        self._closed = self._closing = self._stepping = False
        self._failure: BaseException | None = None
        self._dropped: deque[int] = deque()  # streams nobody reads any more
        self._cancelled: deque[int] = deque()  # asked for in the middle of a step
        self._late = 0  # prompt tokens of the step that is still running
        with mx.stream(self._lane):
            mx.eval(model.constants())  # what building it left undone: threads that come later could not
            self._build(config)

    def _build(self, config: EngineConfig) -> None:
        self.specs = choose(self.model.cache_specs(), config.kv, config.max_kv_size, self.model.dtype)
        self.budget = divide(self.model, self.specs, config, config.chunk or pace.longest(self.model))
        memory = plan(self.specs, self.budget.kv, config.max_running)
        self.groups, self.node, self._fits = memory.groups, memory.node, memory.fits
        self.context = self._context(memory.fits)
        compiled = device.backend() != "cpu" if config.compile is None else config.compile
        self._limits = MlxLimits(self.budget, config)
        self.pools = KVPools(self.groups)
        self.runner = Runner(self.model, self.specs, self.pools, compiled)
        if self.runner.replay is not None and config.memory is not None:
            self.runner.replay.most = min(self.runner.replay.most, self.budget.total // 32)  # the limit is the user's
        reuse = config.prefix_cache and not config.deterministic
        self.store = PrefixCache(self.empty, self.node) if reuse else None
        check_buffers(buffers(self.model, self.pools.arrays))
        step = min(g.spec.max_step for g in self.groups)
        limits = Limits(config.max_running, self.budget.chunk, self.context, step, config.max_queue, config.max_stall)
        if config.deterministic:
            chunk = min(config.chunk or FIXED_CHUNK, self.budget.chunk)
            limits = replace(limits, chunk=chunk, alone=True)
            log.info(
                f"deterministic: one sequence a step, prompts in steps of {min(chunk, step)} tokens, no prefix reuse"
            )
        self.scheduler = Scheduler(self.empty, self.store, limits)
        self.scheduler.notice = self._notice
        if config.max_stall_ms is not None:
            self.scheduler.pace = FIRST_PACE
        if config.chunk is None and not config.deterministic:
            chunk = pace.choose(self.model, self._trial, min(self.context - 1, step, self.budget.chunk))
            self.scheduler.limits = replace(limits, chunk=chunk)
        self.disk = self._open_disk(self.store) if self.store is not None and config.disk_cache else None

    def _trial(self, n: int) -> mx.array:
        """A step of n tokens that nobody asked for."""
        seq = self._own((0,) * n, self.empty())
        if not self.scheduler.grow(seq, n):
            raise WontFit(f"no room for a step of {n} tokens; raise kv_memory")
        hidden = self.runner.hidden(Step((Slice(seq, 0, n, False),)))
        self.runner.positions -= n
        return hidden

    def _context(self, fits: int) -> int:
        own, asked = self.model.config.context, self.config.max_context
        if asked is not None and asked > own:
            raise BadRequest(f"max_context {asked} is beyond the model's own {own} tokens")
        if asked is not None and asked > fits:
            raise WontFit(f"max_context {asked} does not fit: {fits} tokens do; raise kv_memory")
        return min(asked or own, fits)

    def _open_disk(self, store: PrefixCache) -> DiskStore:
        if not all(g.spec.portable for g in self.groups):
            raise BadRequest("disk_cache does not apply: a model that runs through mlx-lm keeps its memory there")
        folder, limit = Path(str(self.config.disk_cache)).expanduser().absolute(), nbytes(self.config.disk_cache_bytes)
        return DiskStore(folder, limit, self.identity(), store, self.pools, self.runner.flush, self.empty)

    # Turns: threads use an engine one after another, and every one of them works on the engine's own stream

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """The engine to oneself, between two steps. Others wait, and come in the order they asked."""
        self._turns.acquire()
        try:
            with mx.stream(self._lane):
                yield
        finally:
            if not self._stepping:
                self._sweep()
            self._turns.release()
            self._tidy()

    def _tidy(self) -> None:
        """End what was dropped meanwhile. Never waits: whoever has the turn does it when the turn ends."""
        while self._dropped and self._turns.try_acquire():
            try:
                self._sweep()
            finally:
                self._turns.release()

    def empty(self) -> tuple[LayerState, ...]:
        return tuple(g.spec.empty(g.pool) for g in self.groups)

    def identity(self) -> dict[str, str]:
        if self._identity is None:
            self.runner.flush()  # it may read the weights on the host, and MLX moves what is read there
            self._identity = identify(self.model, self.specs, self._tokenizer, self.source.files, self.node)
        return self._identity

    def _own(self, tokens: tuple[int, ...], parts: tuple[LayerState, ...], length: int = 0) -> Sequence:
        """A sequence the scheduler does not know, under a number nobody else has."""
        return Sequence(next(self._numbers), Request(tokens=tokens), tokens, parts=parts, length=length)

    def _check_open(self) -> None:
        if self._closed:
            raise self.farewell("the engine is closed; load it again")

    def farewell(self, text: str) -> EngineClosed:
        """What whoever comes too late is told."""
        if self._failure is None:
            return EngineClosed(text)
        told = EngineFailed(f"the engine stopped in the middle of a step ({self._failure!r}); load it again")
        told.__cause__ = self._failure
        return told

    # The life of a request

    def cancel(self, id: int) -> None:
        """End a request now; whoever reads it gets a last event. One that has ended already is left alone."""
        self._cancelled.append(id)
        if not self._turns.mine:  # otherwise it is done when the step is
            self._catch_up()
        self._desk.wake()

    def _sweep(self) -> None:
        """Do what was asked for in the middle of a step, or by somebody who could not wait."""
        while self._dropped:
            self._drop(self._dropped.popleft())
        if self._closing:
            self._shut(None)
        while self._cancelled:
            ticket = self._tickets.get(self._cancelled.popleft())
            if ticket is not None and not ticket.seq.finish:
                self._end(ticket.seq, Finish.CANCELLED)

    def pause(self, id: int) -> None:
        """No more tokens for a request until `resume`: whoever reads it lags behind."""
        with self.exclusive():
            if (ticket := self._tickets.get(id)) is not None:
                self.scheduler.pause(ticket.seq)

    def resume(self, id: int) -> None:
        with self.exclusive():
            if (ticket := self._tickets.get(id)) is not None:
                self.scheduler.resume(ticket.seq)

    def resume_all(self) -> None:
        with self.exclusive():
            for ticket in self._tickets.values():
                if ticket.seq.paused:
                    self.scheduler.resume(ticket.seq)

    @property
    def busy(self) -> bool:
        """Whether there is anything to step for."""
        return bool(self.scheduler.running or self.scheduler.waiting or self._flights)

    def abandon(self, ids: list[int], wait: bool = True) -> None:
        """Nobody reads these requests any more. When nothing else is running, the tail is written to the pools: the
        next request need not wait for it."""
        self._dropped.extend(ids)
        if wait and not self._turns.mine:
            self._catch_up()
        else:
            self._tidy()

    def _catch_up(self) -> None:
        with self.exclusive():  # leaving it does what is left to do
            if not self.busy and not self._closed:
                self.runner.flush()

    def _drop(self, id: int) -> None:
        if (ticket := self._tickets.pop(id, None)) and not ticket.seq.finish:
            self.scheduler.finish(ticket.seq, Finish.CANCELLED)
            self._finished(ticket.seq)

    def _end(self, seq: Sequence, reason: Finish, error: Exception | None = None) -> None:
        """A request is over, and not by a token."""
        self.scheduler.finish(seq, reason)
        self._tickets[seq.id].end(reason, error)
        self._finished(seq, reason)

    def _finished(self, seq: Sequence, reason: Finish | None = None) -> None:
        self.metrics.finished[str(reason or seq.finish)] += 1
        if (ticket := self._tickets.get(seq.id)) is not None and ticket.listener is not None:
            del self._tickets[seq.id]  # nobody comes to take its last event: it was brought
        self._watch.tell("finished", seq, reason or seq.finish)

    def _notice(self, what: str, seq: Sequence) -> None:
        if what == "started" and not seq.preempted:
            self.metrics.note_start(len(seq.prompt), seq.cached)
        self._watch.tell(what, seq)

    # Steps

    def step(self) -> bool:
        """Launch the next step, then read the oldest. False when there is nothing to do. Ctrl-C waits for its end."""
        with StepInterrupt() as interrupt:
            moved = self._take_turn()
        if interrupt.asked:
            raise KeyboardInterrupt
        return moved

    def _take_turn(self) -> bool:
        with self.exclusive():
            self._check_open()
            if self._stepping:
                raise BadRequest("a callback runs inside a step: it cannot wait for another request of its engine")
            self._stepping, began = True, time.perf_counter()
            try:
                return self._advance(began)
            except BaseException as error:  # the books are half written: nothing here can be trusted any more
                self._shut(error)
                raise
            finally:
                self._stepping = False

    def _advance(self, began: float) -> bool:
        given = self._land_prompts()
        late = self.scheduler.expire()
        for seq in late:
            self._end(seq, Finish.DEADLINE)
        step = self.scheduler.plan()
        failed, self.scheduler.failed = self.scheduler.failed, []
        for seq, error in failed:
            self._end(seq, Finish.ERROR, error)
        if step:
            self._flights.append(self.runner.launch(step))
            if self.config.deterministic:
                self.runner.flush()  # where keys lie decides in which order they are summed: always the same place
        if not self._flights:
            return bool(late or failed or given)
        if not step or len(self._flights) > self.config.ahead:
            given += self._land(self._flights.pop(0))
        self._measure(step.prompted if step else 0, given, began)
        return True

    def _measure(self, prompted: int, given: int, began: float) -> None:
        """A step launched ahead takes its time while the next one lands."""
        self.metrics.note_step(prompted, given)
        late, self._late = (self._late, prompted) if self.config.ahead else (prompted, 0)
        if late:
            self.metrics.note_prompt_work(late, time.perf_counter() - began)
            if self.config.max_stall_ms is not None and (rate := self.metrics.prompt_rate):
                self.scheduler.pace = int(rate * self.config.max_stall_ms / 1e3)

    def _land_prompts(self) -> int:
        """First tokens are given out before the next step is made, if making it waits for them all the same."""
        given = 0
        if self.runner.replay is not None and self._flights and self._flights[-1].prompted:
            while self._flights:
                given += self._land(self._flights.pop(0))
        return given

    def _land(self, flight: Flight) -> int:
        """Give out the tokens of a step; how many they were."""
        if flight.sampled is None:
            return 0
        tokens, failures = flight.sampled.host, flight.sampled.failures()
        given = 0
        for i, (s, token) in enumerate(zip(flight.slices, tokens)):
            if s.seq.finish:
                continue  # ended while this step was running
            if i in failures:
                s.seq.pending.clear()
                self._end(s.seq, Finish.ERROR, failures[i])
                continue
            self._give(s, token, flight.sampled.read(i, token))
            given += 1
            if s.seq.finish and self.disk is not None:
                self.disk.save(s.seq.tokens)
        return given

    def _give(self, s: Slice, token: int, logprobs: Logprobs) -> None:
        """One token to one request."""
        seq, ticket = s.seq, self._tickets[s.seq.id]
        self.scheduler.commit(s, token)
        waited, first = ticket.clock()
        (self.metrics.note_first if first else self.metrics.note_next)(waited)
        if first:
            self._watch.tell("first_token", seq)
        try:
            matched = ticket.receive(token, logprobs)
        except Exception as error:  # a request boundary: what its text does ends this request only
            self._end(seq, Finish.ERROR, error)
            return
        if matched:
            self.scheduler.finish(seq, Finish.STOP)
        if seq.finish:
            self._finished(seq, Finish.STOP if matched else None)

    def close(self) -> None:
        """End every request and give the memory back. Whoever waits for one is told (EngineClosed)."""
        if self._turns.mine and self._stepping:
            self._closing = True  # a callback asked: when the step is over
            return
        with self.exclusive():
            self._shut(None)

    def _shut(self, failure: BaseException | None) -> None:
        if self._closed:
            return
        self._closed, self._closing, self._failure = True, False, failure
        told = "the engine was closed while a request was running"
        self._desk.shut(lambda: self.farewell(told))
        for ticket in list(self._tickets.values()):
            if not ticket.seq.finish:
                if ticket.listener is not None:
                    ticket.deliver(Event(ticket.seq.id, finish_reason=Finish.CANCELLED, error=self.farewell(told)))
                self.scheduler.finish(ticket.seq, Finish.CANCELLED)
                self._finished(ticket.seq)
        self._flights.clear()
        if self.store is not None:
            self.store.clear()
        mx.synchronize(self._lane)
        self.runner.close()
        self._limits.restore()
        mx.clear_cache()
        self._return_lane()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()
