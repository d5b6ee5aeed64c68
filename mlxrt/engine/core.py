"""The engine core: schedule, launch, process outputs; and every request from submission to finish.

MLX streams are per thread: lazy arrays made on one thread's stream cannot be evaluated from another. So threads take
turns under a fair lock, and all of them work on the core's own stream. Knows nothing of prompts and conversations.
"""

import logging
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import mlx.core as mx

from ..cache import LayerState, PrefixCache
from ..cache.memory import KVPools, apply_kv_options, size_pools
from ..cache.storage import DiskStore
from ..config import EngineConfig, nbytes
from ..errors import BadLogits, BadRequest, EngineClosed, EngineFailed, GrammarFailed, is_out_of_memory
from ..kernels import device
from ..models import CausalLM
from ..text import Tokenizer
from ..weights.identity import FileStamp, identify
from .check_config import check_disk_cache, check_graphs, disk_folder
from .kv_allocator import KVAllocator
from .memory import (
    MlxLimits,
    StepMemory,
    check_buffers,
    choose_context,
    count_buffers,
    max_chunk_size,
    plan_memory,
    refuse_overflow,
    tune_chunk_size,
)
from .model_runner import InflightStep, ModelRunner
from .output import OutputProcessor
from .process_exit import block_if_exiting, register_steps, track_thread
from .request import EngineEvent, Finish, Logprobs, Request, keep_error
from .scheduler import Limits, Scheduler
from .sequence import NOTHING_UNCHECKED, Sequence, Slice
from .stats import Metrics, Stats
from .threads import FairLock, StepInterrupt, acquire_stream, release_stream

log = logging.getLogger("mlxrt")

DETERMINISTIC_CHUNK = 512  # prompt tokens in a step where that may not depend on the machine
MLX_ERRORS = (RuntimeError, ValueError)  # as which C++ exceptions of MLX reach Python
CLOSED_WHILE_RUNNING = "the engine was closed while a request was running"


@dataclass(frozen=True)
class Source:
    """Where the model came from, as far as the engine must know."""

    name: str = ""
    files: tuple[FileStamp, ...] = ()  # as they were when they were read
    eos: frozenset[int] = frozenset()
    generation: tuple[tuple[str, Any], ...] = ()  # sampling defaults the model's authors give
    capabilities: tuple[tuple[str, Any], ...] = ()  # what its files say of its answers: reasoning_parser, tool_parser


class EngineCore:
    def __init__(
        self,
        model: CausalLM,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
        source: Source,
        on_event: Callable[[EngineEvent], None] | None = None,
    ):
        self.model, self.config, self.tokenizer, self.source = model, config, tokenizer, source
        self._lock, self._stream = FairLock(), acquire_stream()
        self._release_stream = weakref.finalize(self, release_stream, self._stream)  # if it is never closed
        self.metrics = Metrics()
        self.outputs = OutputProcessor(self.metrics, on_event)
        self.positions = 0  # tokens run through the model
        self._inflight: list[InflightStep] = []
        self._unchecked: list[InflightStep] = []  # prefill steps whose hidden states may not be finite
        self._detached_ids = count(-1, -1)
        self._identity: dict[str, str] | None = None
        self._closed = self._closing = self._in_step = False
        self._failure: BaseException | None = None
        self._aborts: deque[tuple[int, bool]] = deque()  # deferred: (request, whether it gets a last event)
        self._doing = ""  # what the device was last asked for, for messages
        self._launched_prefill = 0  # prompt tokens of the step that is still running
        track_thread()
        register_steps(self)
        with mx.stream(self._stream):
            mx.eval(model.constants())  # lazy arrays of the loading thread could not be evaluated from another
            with refuse_overflow(source.name or "the model"):
                self._build(config)

    def _build(self, config: EngineConfig) -> None:
        model = self.model
        self.specs = apply_kv_options(model.cache_specs(), config.kv, config.max_kv_size, model.dtype)
        self.memory = plan_memory(model, self.specs, config, config.chunk or max_chunk_size(model))
        sizing = size_pools(self.specs, self.memory.kv, config.max_running, self.memory.chunk)
        self.node_size, self.kv_tokens = sizing.node, sizing.fits
        self.context = self._context_length()
        self._mlx_limits = MlxLimits(self.memory, config)
        step = StepMemory(model, self.specs, config.max_running, self.memory.limit)
        chunk, context = self.memory.chunk, self.context
        self.pools = KVPools(
            sizing.groups, lambda tokens: step.bytes_of(chunk, config.max_running, min(tokens, context))
        )
        compiled = device.backend() != "cpu" if config.compile is None else config.compile
        check_graphs(config)
        graph_bytes = device.memory()[1] // 16 if config.memory is None else self.memory.total // 32
        graph_bytes = 0 if config.cuda_graphs is False else graph_bytes
        self.runner = ModelRunner(model, self.specs, self.pools, compiled, graph_bytes)
        check_buffers(count_buffers(model, self.pools.arrays))
        reuse = config.prefix_cache and not config.deterministic
        self.prefix_cache = PrefixCache(self.pools.empty_states, self.node_size) if reuse else None
        self.allocator = KVAllocator(self.pools.empty_states, self.prefix_cache)
        fit_prefill = step.fit if device.backend() != "cpu" else None
        self.scheduler = Scheduler(self.allocator, self._limits(config), fit_prefill=fit_prefill)
        self.disk = self._open_disk(self.prefix_cache) if self.prefix_cache is not None and config.disk_cache else None

    def _context_length(self) -> int:
        return choose_context(self.model.config.context, self.config.max_context, self.kv_tokens)

    def _limits(self, config: EngineConfig) -> Limits:
        chunk = self.memory.chunk
        if config.deterministic:
            chunk = min(config.chunk or DETERMINISTIC_CHUNK, chunk)
            log.info(f"deterministic: one sequence a step, prompts in steps of {chunk} tokens, no prefix reuse")
        elif config.chunk is None:
            chunk = tune_chunk_size(self.model, self._trial_step, min(self.context - 1, chunk))
        return Limits(
            config.max_running,
            chunk,
            self.context,
            config.max_queue,
            config.max_stall,
            config.max_stall_ms,
            deterministic=config.deterministic,
        )

    def _trial_step(self, n: int) -> mx.array:
        """The hidden states of n dummy tokens, for timing."""
        seq = self.detach((0,) * n, self.pools.empty_states())
        return self.runner.hidden(self.allocator.step_of(seq, n))

    def _open_disk(self, cache: PrefixCache) -> DiskStore:
        check_disk_cache(g.spec for g in self.pools.groups)
        limit = nbytes(self.config.disk_cache_bytes)
        return DiskStore(disk_folder(self.config), limit, self.identity(), cache, self.pools, self.runner.flush)

    def identity(self) -> dict[str, str]:
        """What a saved state must agree with to be loaded: model, cache kinds, tokenizer."""
        if self._identity is None:
            self.runner.flush()  # it may read the weights on the host, and MLX moves arrays that are read there
            self._identity = identify(self.model, self.specs, self.tokenizer, self.source.files, self.node_size)
        return self._identity

    # Exclusive use

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """The engine for this thread alone, between two steps. Threads get it in the order they asked."""
        track_thread()
        if not self._lock.mine:
            block_if_exiting()
        self._lock.acquire()
        try:
            with mx.stream(self._stream):
                yield
        finally:
            try:
                if not self._in_step:
                    self._run_deferred()
            finally:  # a listener may have raised Ctrl-C: other threads wait for the lock
                self._lock.release()
            self._run_deferred_if_free()

    @contextmanager
    def device_work(self, what: str) -> Iterator[None]:
        """Exclusive use to write keys and values outside a step: a failure in the middle leaves them half written, so
        it ends the engine, and Ctrl-C waits for the end."""
        with StepInterrupt() as interrupt, self.exclusive():
            self.check_open()
            self._doing = what
            try:
                yield
            except MLX_ERRORS as error:
                self._shut_down(error)
                raise self.closed_error("") from error
        if interrupt.requested:
            raise KeyboardInterrupt

    def _run_deferred(self) -> None:
        """Abort and close what was asked for in the middle of a step, or by a caller that could not wait."""
        while self._aborts:
            id, emit = self._aborts.popleft()
            state = self.outputs.states.get(id) if emit else self.outputs.states.pop(id, None)
            if state is not None and not state.seq.finish:
                self.finish(state.seq, Finish.CANCELLED, emit=emit)
        if self._closing:
            self._shut_down(None)

    def _run_deferred_if_free(self) -> None:
        """Never blocks: a thread that holds the lock does it when it releases it."""
        while self._aborts and self._lock.try_acquire():
            try:
                self._run_deferred()
            finally:
                self._lock.release()

    @property
    def owner_thread(self) -> int | None:
        """The thread that has the engine for itself."""
        return self._lock.owner

    def wake(self) -> None:
        """Let waiting threads look again whether there is something for them."""
        self.outputs.notify()

    def check_open(self) -> None:
        if self._closed:
            raise self.closed_error("the engine is closed; load it again")

    @property
    def failure(self) -> BaseException | None:
        """Why the engine stopped by itself, if it did."""
        return self._failure

    def closed_error(self, message: str) -> EngineClosed:
        if self._failure is None:
            return EngineClosed(message)
        notes = "".join(f", {note}" for note in getattr(self._failure, "__notes__", ()))
        stopped = f"the engine stopped in the middle of {self._doing}"
        error = EngineFailed(f"{stopped} ({self._failure!r}{notes}); load it again")
        error.__cause__ = self._failure
        return error

    # Requests

    def add_request(self, request: Request, prompt: tuple[int, ...], stops: frozenset[int], seed: int) -> Sequence:
        """Queue a request. What the disk has of its prompt comes into the prefix cache first."""
        if self.disk is not None and len(prompt) < self.context:
            with self.device_work("recalling a prompt from disk"):
                self.disk.recall(prompt, request.cache_salt)
        return self.scheduler.add(request, prompt, stops, seed)

    def finish(self, seq: Sequence, reason: Finish, error: Exception | None = None, emit: bool = True) -> None:
        """End a request that no token ended; `emit` its last event."""
        self.scheduler.finish(seq, reason)
        if not self.busy:
            self._unchecked.clear()  # nobody steps any more to look at them, and those they are of have ended
        self.outputs.finish(seq, reason, error, emit)

    def abort(self, id: int, wait: bool = True) -> None:
        """End a request; its reader gets a last event. One that has ended already is left alone.

        Without `wait` the next step ends it, and no lock is taken: a signal handler may call it."""
        self._aborts.append((id, True))
        if wait:
            self._defer(wait=True)
            self.outputs.notify()

    def drop(self, ids: Iterable[int], wait: bool = True) -> None:
        """End requests that have no reader any more. Without `wait` it never blocks, so a finaliser may call it."""
        self._aborts.extend((id, False) for id in ids)
        self._defer(wait)

    def _defer(self, wait: bool) -> None:
        """Run what was deferred: at the end of the step if this thread is inside one. When nothing else is running
        the decode tail is flushed too, so that the next request need not wait for it."""
        if not wait or self._lock.mine:
            return self._run_deferred_if_free()
        with self.exclusive():  # leaving it runs what was deferred
            if not self.busy and not self._closed:
                self._flush_idle()

    def _flush_idle(self) -> None:
        """Flush the decode tail of requests that have ended. Their answers are whole: where the device fails here they
        are not lost by it, and the next request gets the error."""
        try:
            self.runner.flush()
        except MLX_ERRORS as error:
            self._shut_down(error)
            log.error(f"{self.closed_error('')}")

    def pause(self, id: int) -> None:
        """No more tokens for a request until `resume`: its reader lags behind."""
        with self.exclusive():
            if (state := self.outputs.states.get(id)) is not None:
                self.scheduler.pause(state.seq)

    def resume(self, id: int) -> None:
        with self.exclusive():
            if (state := self.outputs.states.get(id)) is not None:
                self.scheduler.resume(state.seq)

    def resume_all(self) -> None:
        with self.exclusive():
            for state in list(self.outputs.states.values()):  # readers take theirs out meanwhile
                if state.seq.paused:
                    self.scheduler.resume(state.seq)

    @property
    def busy(self) -> bool:
        """Whether there is anything to step for."""
        return bool(self.scheduler.running or self.scheduler.waiting or self._inflight)

    # Steps

    def step(self) -> bool:
        """Launch the next step, then read the oldest. False when there was nothing to do. Ctrl-C waits for its end."""
        with StepInterrupt() as interrupt, self.exclusive():
            self.check_open()
            if self._in_step:
                raise BadRequest("a callback runs inside a step: it cannot wait for another request of its engine")
            self._in_step = True
            try:
                progressed = self._step(time.perf_counter())
            except BaseException as error:  # the state is half written: nothing here can be trusted any more
                self._shut_down(error)
                if isinstance(error, MLX_ERRORS):
                    raise self.closed_error("") from error
                raise
            finally:
                self._in_step = False
        if interrupt.requested:
            raise KeyboardInterrupt
        return progressed

    def _step(self, began: float) -> bool:
        emitted, newest = 0, self._inflight[-1] if self._inflight else None
        if newest and newest.prefill_tokens and newest.sampled and self.runner.graphs is not None:
            emitted = self._retire_all()  # a graph cannot be launched before: it would wait anyway
            if newest.only_first_tokens:
                # Readers get them now: the next step takes the host a millisecond, and 20 to 50 if it is captured.
                self._measure(0, emitted, began)
                return True
        overflowed = self._check_prefill() if self.allocator.frees_unchecked(self.scheduler.limits.chunk) else 0
        expired = self.scheduler.expire()
        for seq in expired:
            self.finish(seq, Finish.DEADLINE)
        # Schedule
        step, events, failed = self.scheduler.plan()
        for kind, seq in events:
            self.outputs.hook(kind, seq)
        for seq, error in failed:
            self.finish(seq, Finish.ERROR, error)
        # Launch
        if step:
            self._doing = describe_step(len(step.slices), step.num_tokens)
            launched = self.runner.launch(step)
            self.allocator.end_launch(step)
            overflowed += self._check_prefill()  # here, where a launched step keeps the device busy meanwhile
            if launched.finite is not None:
                self._unchecked.append(launched)
                mark_unchecked(launched.rows)
            if launched.draw is not None:  # what may come next depends on the tokens before: read them meanwhile
                emitted += self._retire_all()
                launched = self.runner.sample(launched)
            self._inflight.append(launched)
            self.positions += step.num_tokens
            if self.config.deterministic:
                self.runner.flush()  # the order of sums depends on where keys are stored: always in the pools
        else:
            overflowed += self._check_prefill()
        # Process outputs
        if not self._inflight:
            return bool(overflowed or expired or failed or emitted)
        if not step or len(self._inflight) > self.config.ahead:
            emitted += self._retire(self._inflight.pop(0))
        if step and any(s.seq.request.on_logits for s in step.slices):
            # A row with a callback cannot be launched ahead. Without it the batch would be another one in every
            # second step, and its tail be flushed each time.
            emitted += self._retire_all()
        self._measure(step.prefill_tokens if step else 0, emitted, began)
        if not self.busy:
            device.release_idle_cache()
        return True

    def _check_prefill(self) -> int:
        """End requests whose prompt overflows; how many they were. Waits for the prefill steps launched so far.

        Nothing of an unchecked chunk goes to the prefix cache: attention may spread one token's NaN over the tokens
        before it in the same step, which others' prompts may begin with.
        """
        steps, self._unchecked = self._unchecked, []
        ended = 0
        for step in steps:
            for s in step.rows:
                s.seq.unchecked = NOTHING_UNCHECKED
            for s in step.overflows():
                seq = s.seq
                seq.max_cached = min(seq.max_cached, s.start)
                if not seq.finish:
                    seq.pending.clear()
                    self.finish(seq, Finish.ERROR, overflow_error(s))
                    ended += 1
        return ended

    def _retire_all(self) -> int:
        """Wait for the tokens of all steps in flight and emit them; how many they were."""
        emitted = 0
        while self._inflight:
            emitted += self._retire(self._inflight.pop(0))
        return emitted

    def _retire(self, inflight: InflightStep) -> int:
        """Wait for the tokens of a step and emit them; how many they were."""
        sampled = inflight.sampled
        if sampled is None:
            return 0
        if any(step.rows is inflight.rows for step in self._unchecked):
            self._check_prefill()  # its last token may end the request, which caches what it computed
        tokens, failures, emitted = sampled.host, sampled.failures(), 0
        for i, (s, token) in enumerate(zip(inflight.slices, tokens)):
            seq = s.seq
            if seq.finish:
                continue  # finished while this step was running
            if i in failures:
                seq.pending.clear()
                seq.max_cached = min(seq.max_cached, s.start)
                self.finish(seq, Finish.ERROR, failures[i])
                continue
            logprobs = () if seq.forced else sampled.read(i, token)
            token = seq.forced.pop(0) if seq.forced else token
            try:
                complete = seq.grammar is not None and token not in seq.stops and seq.grammar.advance(token)
            except GrammarFailed as error:
                seq.pending.clear()
                self.finish(seq, Finish.ERROR, error)
                continue
            self.scheduler.commit(s, token, complete)
            self._emit(seq, token, logprobs)
            emitted += 1
            if seq.finish and self.disk is not None:
                self.disk.save(seq.tokens, seq.request.cache_salt)
        return emitted

    def _emit(self, seq: Sequence, token: int, logprobs: Logprobs) -> None:
        try:
            matched = self.outputs.process(seq, token, logprobs)
        except BaseException as raised:  # a request boundary: what its text or its listener does ends this request only
            self.finish(seq, Finish.ERROR, keep_error(raised))
            return
        if matched:
            self.scheduler.finish(seq, Finish.STOP)
        if seq.finish:
            self.outputs.record_finish(seq, Finish.STOP if matched else seq.finish)

    def _measure(self, prefill_tokens: int, emitted: int, began: float) -> None:
        """Count the step. A step launched ahead takes its time while the next one is retired."""
        self.metrics.add_step(prefill_tokens, emitted)
        done = prefill_tokens
        if self.config.ahead:
            done, self._launched_prefill = self._launched_prefill, prefill_tokens
        if done:
            self.metrics.add_prefill(done, time.perf_counter() - began)
            if rate := self.metrics.prefill_rate:
                self.scheduler.set_prefill_rate(rate)

    # Sequences the scheduler does not know

    def detach(
        self, tokens: tuple[int, ...], parts: tuple[LayerState, ...], length: int = 0, salt: str = ""
    ) -> Sequence:
        """A sequence outside the scheduler, under an id of its own."""
        request = Request(tokens=tokens, cache_salt=salt)
        return Sequence(next(self._detached_ids), request, tokens, parts=parts, length=length)

    def feed(self, seq: Sequence, n: int) -> mx.array:
        """Compute the next n known tokens of a detached sequence; their logits, float32 [n, vocab]."""
        with self.device_work(describe_step(1, n)):
            step = self.allocator.step_of(seq, n)
            self.positions += n
            logits = self.model.logits(self.runner.hidden(step, every=True)).astype(mx.float32)
            self.allocator.end_launch(step)
            finite = mx.isfinite(logits).all()
            mx.eval(logits, finite, self.runner.live)
            if not finite.item():
                seq.max_cached = min(seq.max_cached, seq.length - n)
        return logits

    # Statistics and shutdown

    def stats(self) -> Stats:
        with self.exclusive():
            cache = self.prefix_cache
            groups = [i for i, part in enumerate(self.pools.empty_states()) if part.has_checkpoints]
            return Stats(
                **self.scheduler.stats(),
                **self.metrics.stats(),
                **self._kv_stats(),
                stored_nodes=len(cache) if cache is not None else 0,
                hits=cache.hits if cache is not None else 0,
                misses=cache.misses if cache is not None else 0,
                reused_tokens=cache.reused if cache is not None else 0,
                evictions=cache.evictions if cache is not None else 0,
                checkpoints=cache.checkpoint_spacing(groups[0]) if cache is not None and groups else {},
                disk=self.disk.stats() if self.disk is not None else None,
                positions=self.positions,
                peak_memory=mx.get_peak_memory(),
                memory_limit=self.memory.limit,
                buffers=count_buffers(self.model, self.pools.arrays),
            )

    def _kv_stats(self) -> dict[str, Any]:
        groups, total = self.pools.groups, [0, 0, 0]
        for i, g in enumerate(groups):
            live = {b.id for seq in self.scheduler.running if seq.parts for b in seq.parts[i].blocks}
            stored = self.prefix_cache.block_ids(i) if self.prefix_cache is not None else set()
            for k, blocks in enumerate((live, stored, live & stored)):
                total[k] += g.nbytes(len(blocks))
        allocated = sum(g.nbytes(g.pool.size) for g in groups)
        return dict(
            kv_bytes=sum(g.nbytes(g.pool.used) for g in groups),
            kv_live=total[0],
            kv_stored=total[1],
            kv_shared=total[2],
            kv_allocated=allocated,
            kv_limit=sum(g.nbytes(g.pool.limit) for g in groups),
            bytes={
                "weights": self.memory.weights,
                "kv": allocated,
                "activations": self.memory.activations,
                "active": mx.get_active_memory(),
                "cache": mx.get_cache_memory(),
            },
        )

    def close(self) -> None:
        """End every request and free the memory. Threads that wait for one get EngineClosed."""
        if self._lock.mine and self._in_step:
            self._closing = True  # asked for by a callback: when the step is over
            return
        with self.exclusive():
            self._shut_down(None)

    def _shut_down(self, failure: BaseException | None) -> None:
        if self._closed:
            return
        self._closed, self._closing, self._failure = True, False, failure
        self.outputs.close(lambda: self.closed_error(CLOSED_WHILE_RUNNING))
        for state in list(self.outputs.states.values()):
            if not state.seq.finish:
                self.finish(state.seq, Finish.CANCELLED, self.closed_error(CLOSED_WHILE_RUNNING))
        self._inflight.clear()
        if self.prefix_cache is not None:
            self.prefix_cache.clear()
        if self.disk is not None:
            self.disk.close()
        if isinstance(failure, Exception) and not is_out_of_memory(failure):
            log_defect(f"the engine stopped in the middle of {self._doing}", failure)
        if failure is not None:
            traceback.clear_frames(failure.__traceback__)  # their locals hold arrays
            if is_out_of_memory(failure):
                total, free = device.memory()
                failure.add_note(f"{free} of {total} bytes of the device were free")
        try:
            mx.synchronize(self._stream)
            self.runner.close()
            self._mlx_limits.restore()
            mx.clear_cache()
        except RuntimeError as error:
            if failure is None:
                raise
            log.error(f"the device does not answer after a failed step: {error}; restart the program to use it again")
        self._release_stream()


def log_defect(line: str, error: Exception) -> None:
    """A line and the traceback, as text: a handler that keeps the error itself would keep blocks through its frames."""
    record = log.makeRecord(log.name, logging.ERROR, __file__, 0, line, (), None)
    record.exc_text = "".join(traceback.format_exception(error)).rstrip()
    log.handle(record)


def describe_step(rows: int, tokens: int) -> str:
    sequences = f"{rows} sequence{'s' * (rows != 1)}"
    return f"a decode step of {sequences}" if tokens == rows else f"a step of {tokens} tokens of {sequences}"


def mark_unchecked(slices: Iterable[Slice]) -> None:
    for s in slices:
        if s.is_chunk:
            s.seq.unchecked = min(s.seq.unchecked, s.start)


def overflow_error(s: Slice) -> BadLogits:
    return BadLogits(
        f"request {s.seq.id}: tokens {s.start} to {s.stop - 1} give hidden states that are NaN or infinite; where "
        "float16 overflows, dtype bfloat16 does not; else check the weights"
    )
