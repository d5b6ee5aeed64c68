"""The one door. The Python API, the command line and the benchmarks all come through here."""

import sys
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Self

import mlx.core as mx

from . import device
from .cache import LayerState, PrefixStore, SequenceState
from .cache.memory import choose, plan
from .config import EngineConfig, nbytes
from .disk import DiskStats, DiskStore
from .errors import BadRequest, EngineClosed, NoTokenizer, WontFit
from .identity import identify
from .models import CausalLM
from .request import Completion, Event, Finish, Request, Sequence
from .runner import Flight, Runner
from .sampling import check_params, draw_seed
from .scheduler import Limits, Scheduler, Slice, Step
from .session import Session
from .stream import Stream
from .text import StopMatcher, Tokenizer
from .ticket import Ticket, complete


@dataclass(frozen=True)
class Stats:
    """What the engine holds and has done."""

    running: int
    waiting: int
    kv_bytes: int  # in places that somebody holds
    kv_live: int  # of them, those of running sequences
    kv_stored: int  # those of stored prefixes
    kv_shared: int  # those of both
    kv_allocated: int
    kv_limit: int
    stored_nodes: int
    hits: int
    misses: int
    reused_tokens: int
    evictions: int
    checkpoints: dict[int, int]  # tokens between two of them -> how often; empty where any length can be resumed
    preemptions: int
    positions: int  # tokens run through the model
    peak_memory: int
    disk: DiskStats | None  # None without disk_cache


@dataclass(frozen=True)
class Source:
    """Where the model came from, as far as the engine must know."""

    name: str = ""
    files: tuple[Path, ...] = ()
    eos: frozenset[int] = frozenset()
    generation: tuple[tuple[str, Any], ...] = ()  # sampling defaults the model's authors give


def tell(line: str) -> None:
    print(line, file=sys.stderr)


class Engine:
    def __init__(
        self,
        model: CausalLM,
        config: EngineConfig = EngineConfig(),  # noqa: B008  frozen
        tokenizer: Tokenizer | None = None,
        source: Source = Source(),  # noqa: B008  frozen
        say: Callable[[str], None] = tell,
    ):
        self.model, self.config, self.source, self._tokenizer = model, config, source, tokenizer
        self.specs = choose(model.memory(), config.kv, config.max_kv_size, model.dtype, say)
        memory = plan(self.specs, self._budget(), config.max_running)
        self.groups, self.node, self.context = memory.groups, memory.node, self._context(memory.fits)
        compiled = device.kind() != "cpu" if config.compile is None else config.compile
        self.runner = Runner(model, self.specs, self.groups, compiled)
        self.store = PrefixStore(self.empty, self.node) if config.prefix_cache else None
        step = min(g.spec.max_step for g in self.groups)
        self.scheduler = Scheduler(self.empty, self.store, Limits(config.max_running, config.chunk, self.context, step))
        self._flights: list[Flight] = []
        self._numbers = count(-1, -1)
        self._tickets: dict[int, Ticket] = {}
        self._identity: dict[str, str] | None = None
        self._closed = False
        self.disk = self._open_disk(self.store, say) if self.store is not None and config.disk_cache else None

    def _budget(self) -> int:
        """Bytes for keys, values and states."""
        return device.memory()[1] // 2 if self.config.kv_memory is None else nbytes(self.config.kv_memory)

    def _context(self, fits: int) -> int:
        own, asked = self.model.config.context, self.config.max_context
        if asked is not None and asked > own:
            raise BadRequest(f"max_context {asked} is beyond the model's own {own} tokens")
        if asked is not None and asked > fits:
            raise WontFit(f"max_context {asked} does not fit: {fits} tokens do; raise kv_memory")
        return min(asked or own, fits)

    def _open_disk(self, store: PrefixStore, say: Callable[[str], None]) -> DiskStore:
        if not all(g.spec.portable for g in self.groups):
            raise BadRequest("disk_cache does not apply: a model that runs through mlx-lm keeps its memory there")
        folder, limit = Path(str(self.config.disk_cache)).expanduser().absolute(), nbytes(self.config.disk_cache_bytes)
        return DiskStore(folder, limit, self.identity(), store, self.runner, self.empty, say)

    def empty(self) -> tuple[LayerState, ...]:
        return tuple(g.spec.empty(g.pool) for g in self.groups)

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise NoTokenizer(f"{self.source.name or 'this model'} came without a tokenizer: give and take tokens")
        return self._tokenizer

    # Requests

    def generate(self, x, **options) -> Any:
        """A Completion for one input, a list of them for a list of Requests."""
        many = is_many(x)
        requests = [Request.of(r, **options) for r in (x if many else [x])]
        events: dict[int, list[Event]] = {}
        with self._stream(requests) as stream:
            order = list(stream.ids)
            for event in stream:
                events.setdefault(event.id, []).append(event)
        for id in order:
            if error := events[id][-1].error:
                raise error
        done: list[Completion] = [complete(events[id]) for id in order]
        return done if many else done[0]

    def stream(self, x, **options) -> Stream:
        """Events as they come. Closing the stream cancels what is left."""
        return self._stream([Request.of(r, **options) for r in (x if is_many(x) else [x])])

    def _stream(self, requests: list[Request]) -> Stream:
        ids: list[int] = []
        try:
            for request in requests:
                ids.append(self.submit(request))
        except Exception:
            for id in ids:
                self.cancel(id)
            raise
        return Stream(ids, self._take, self.cancel)

    def submit(self, request: Request) -> int:
        """Queue a request; its events come from `stream`, or from `step` and `take`."""
        if self._closed:
            raise EngineClosed("the engine is closed; load it again")
        params = request.params
        check_params(params, self.model.config.vocab_size)
        prompt = self.encode(request)
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.source.eos)
        seed = draw_seed() if params.seed is None else params.seed
        needs_text = self._tokenizer is not None or params.stop
        detokenizer = self.tokenizer.detokenizer() if needs_text else None
        matcher = StopMatcher(params.stop) if params.stop else None
        if self.disk is not None and len(prompt) < self.context:
            self.disk.recall(prompt)
        seq = self.scheduler.submit(request, prompt, stops, seed)
        vocab = self._tokenizer.vocab_size if self._tokenizer else 0
        self._tickets[seq.id] = Ticket(seq, detokenizer, vocab, matcher)
        return seq.id

    def encode(self, request: Request) -> tuple[int, ...]:
        """A request's prompt as tokens."""
        if request.prompt is not None:
            tokens = self.tokenizer.encode(request.prompt)
        elif request.messages is not None:
            tokens = self.tokenizer.chat(
                list(request.messages),
                tools=list(request.tools) if request.tools is not None else None,
                enable_thinking=request.enable_thinking,
            )
        else:
            tokens = list(request.tokens or ())
        return self.check_tokens(tokens)

    def check_tokens(self, tokens: Many[int]) -> tuple[int, ...]:
        vocab = self.model.config.vocab_size
        for t in tokens:
            if isinstance(t, bool) or not isinstance(t, int) or not 0 <= t < vocab:
                raise BadRequest(f"tokens must be whole numbers in 0..{vocab - 1}, not {t!r}")
        if not tokens:
            raise BadRequest("the prompt is empty: it gives no token")
        return tuple(tokens)

    def cancel(self, id: int) -> None:
        """End a request now. A request that has ended already is left alone."""
        if (ticket := self._tickets.pop(id, None)) and not ticket.seq.finish:
            self.scheduler.finish(ticket.seq, Finish.CANCELLED)

    def _take(self, ids: list[int]) -> Event:
        """The next event of any of these requests; runs steps until there is one."""
        while True:
            if self._closed:
                raise EngineClosed("the engine was closed while a request was running")
            for id in ids:
                ticket = self._tickets[id]
                if ticket.inbox:
                    event = ticket.inbox.popleft()
                    if event.finish_reason:
                        del self._tickets[id]
                    return event
            self.step()

    # Steps

    def step(self) -> bool:
        """Launch the next step, then read the oldest. False when there is nothing to do."""
        step = self.scheduler.plan()
        if step:
            self._flights.append(self.runner.launch(step))
        if not self._flights:
            return False
        if not step or len(self._flights) > self.config.ahead:
            self._land(self._flights.pop(0))
        return True

    def _land(self, flight: Flight) -> None:
        if flight.sampled is None:
            return
        failures = flight.sampled.failures()
        ended: list[Sequence] = []
        tokens: Any = flight.sampled.tokens.tolist()
        for i, (s, token) in enumerate(zip(flight.slices, tokens)):
            if s.seq.finish:
                continue  # ended while this step was running
            ticket = self._tickets[s.seq.id]
            if i in failures:
                s.seq.pending.clear()
                self.scheduler.finish(s.seq, Finish.ERROR)
                ticket.fail(failures[i])
                continue
            logprobs = flight.sampled.read(i, token)
            self.scheduler.commit(s, token)
            if ticket.receive(token, logprobs):
                self.scheduler.finish(s.seq, Finish.STOP)
            if s.seq.finish:
                ended.append(s.seq)
        if self.disk is not None:
            for seq in ended:
                self.disk.keep(seq.tokens)

    # Whole sequences

    def score(self, tokens: Many[int], chunk: int | None = None) -> mx.array:
        """float32 logits [n, vocab] after each token, computed from nothing, `chunk` tokens at a time."""
        known = self.check_tokens(tokens)
        if len(known) > self.context:
            raise BadRequest(f"{len(known)} tokens to score, the context holds {self.context}")
        if chunk is not None and (not isinstance(chunk, int) or chunk < 1):
            raise BadRequest(f"chunk must be a whole number >= 1, not {chunk!r}")
        seq = self._own(known, self.empty())
        rows, most = [], min(chunk or self.config.chunk, self.scheduler.limits.max_step)
        while seq.length < len(known):
            rows.append(self.feed(seq, min(most, len(known) - seq.length)))
        self.runner.settle()
        return mx.concatenate(rows) if len(rows) > 1 else rows[0]

    def feed(self, seq: Sequence, n: int) -> mx.array:
        """Run the next n known tokens of a sequence the scheduler does not own; their logits, float32 [n, vocab]."""
        if not self.scheduler.grow(seq, n):
            raise WontFit(f"no room for {n} more tokens beside what is running; wait, or raise kv_memory")
        step = Step((Slice(seq, seq.length - n, seq.length, False),), self.scheduler.mark(seq))
        logits = self.model.logits(self.runner.hidden(step, every=True)).astype(mx.float32)
        mx.eval(logits, self.runner.tail.live if self.runner.tail else ())
        return logits

    def session(self, system: str | None = None, on_overflow: str = "error", **options) -> Session:
        """A conversation; options are those of `generate`, for every turn. `on_overflow`: error or drop-oldest."""
        return Session(self, system, options, on_overflow)

    def state(self, tokens: Many[int]) -> SequenceState | None:
        """What the store holds of these tokens, pinned."""
        return self.store.resume([*tokens, 0]) if self.store is not None else None

    def whole_state(self, tokens: Many[int]) -> SequenceState | None:
        """The state of these tokens but perhaps the last; what the store has let go is computed again."""
        held = self.state(tokens)
        if self.store is None or not tokens or (held is not None and len(held) >= len(tokens) - 1):
            return held
        known = self.check_tokens(tokens)
        parts, length = (held.parts, len(held)) if held is not None else (self.empty(), 0)
        seq = self._own(known, parts, length)
        most = min(self.config.chunk, self.scheduler.limits.max_step)
        while seq.length < len(known):
            self.feed(seq, min(most, len(known) - seq.length))
        self.scheduler.keep(seq, whole=True)
        self.runner.settle()
        return SequenceState.fit(known, seq.parts)  # not from the store, which has no place for every checkpoint

    def _own(self, tokens: tuple[int, ...], parts: tuple[LayerState, ...], length: int = 0) -> Sequence:
        """A sequence the scheduler does not know, under a number nobody else has."""
        return Sequence(next(self._numbers), Request(tokens=tokens), tokens, parts=parts, length=length)

    def identity(self) -> dict[str, str]:
        if self._identity is None:
            self._identity = identify(self.model, self.specs, self._tokenizer, self.source.files, self.node)
        return self._identity

    def stats(self) -> Stats:
        store = self.store
        live, stored, shared = self._holders()
        return Stats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            kv_bytes=sum(g.nbytes(g.pool.used) for g in self.groups),
            kv_live=live,
            kv_stored=stored,
            kv_shared=shared,
            kv_allocated=sum(g.nbytes(g.pool.size) for g in self.groups),
            kv_limit=sum(g.nbytes(g.pool.limit) for g in self.groups),
            stored_nodes=len(store) if store is not None else 0,
            hits=store.hits if store is not None else 0,
            misses=store.misses if store is not None else 0,
            reused_tokens=store.reused if store is not None else 0,
            evictions=store.evictions if store is not None else 0,
            checkpoints=self._spacing(),
            preemptions=self.scheduler.preemptions,
            positions=self.runner.positions,
            peak_memory=mx.get_peak_memory(),
            disk=self.disk.stats() if self.disk is not None else None,
        )

    def _holders(self) -> tuple[int, int, int]:
        """Bytes held by running sequences, by the store, and by both."""
        total = [0, 0, 0]
        for i, g in enumerate(self.groups):
            running = [seq.parts[i] for seq in self.scheduler.running if seq.parts]
            live = {b.id for part in running for b in part.blocks}
            stored = self.store.held(i) if self.store is not None else set()
            for k, places in enumerate((live, stored, live & stored)):
                total[k] += g.nbytes(len(places))
        return total[0], total[1], total[2]

    def _spacing(self) -> dict[int, int]:
        sparse = [i for i, part in enumerate(self.empty()) if part.sparse]
        return self.store.spacing(sparse[0]) if self.store is not None and sparse else {}

    def close(self) -> None:
        """End every request and give the memory back."""
        if self._closed:
            return
        self._closed = True
        for ticket in self._tickets.values():
            if not ticket.seq.finish:
                self.scheduler.finish(ticket.seq, Finish.CANCELLED)
        self._flights.clear()
        if self.store is not None:
            self.store.clear()
        mx.synchronize()
        self.runner.pools.clear()
        self.runner.tail = None
        mx.clear_cache()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def is_many(x) -> bool:
    return isinstance(x, (list, tuple)) and bool(x) and all(isinstance(r, Request) for r in x)
