"""The one door. The Python API, the command line and the benchmarks all come through here."""

from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Any

import mlx.core as mx

from ..cache import SequenceState
from ..errors import BadRequest, NoTokenizer, PromptWontFit, WontFit, shown
from ..text import StopMatcher, Tokenizer
from .core import Source, StepLoop
from .memory import Cost, activations
from .output import Ticket, complete
from .request import Completion, Event, Request, Sequence
from .request_stream import Stream
from .sampler import check_params, draw_seed
from .session import Session
from .stats import Stats, collect
from .step import Slice, Step

__all__ = ["Engine", "Source"]


class Engine(StepLoop):
    """What users call. Threads may share one: each call takes its turns."""

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
        except BaseException:  # Ctrl-C too: nobody will read what was submitted
            self.abandon(ids)
            raise
        return self.stream_of(ids)

    def stream_of(self, ids: list[int]) -> Stream:
        """The events of requests that were submitted; more can be added while it is read."""
        return Stream(ids, self._desk.take, self.abandon)

    def submit(self, request: Request, listener: Callable[[Event], None] | None = None) -> int:
        """Queue a request; its events come from `stream`, or to `listener` on the thread that makes the steps."""
        params = request.params
        check_params(params, self.model.config.vocab_size)
        prompt = self.encode(request)
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.source.eos)
        seed = draw_seed() if params.seed is None else params.seed
        needs_text = self._tokenizer is not None or params.stop
        detokenizer = self.tokenizer.detokenizer() if needs_text else None
        matcher = StopMatcher(params.stop) if params.stop else None
        vocab = self._tokenizer.vocab_size if self._tokenizer else 0
        with self.exclusive():
            self._check_open()
            self._check_fits(len(prompt))
            if self.disk is not None and len(prompt) < self.context:
                self.disk.recall(prompt)
            seq = self.scheduler.submit(request, prompt, stops, seed)
            self._tickets[seq.id] = Ticket(seq, detokenizer, vocab, matcher, listener=listener)
            self._watch.tell("queued", seq)
        return seq.id

    def _check_fits(self, n: int) -> None:
        if n >= self.context == self._fits < self.model.config.context:
            need, have = self._kv_bytes(n + 1), self._kv_bytes(self._fits)
            hint = f"its keys and values need {need} bytes, there are {have}: shorten it, or raise kv_memory or memory"
            raise PromptWontFit(n, self.context, hint)

    def _kv_bytes(self, n: int) -> int:
        return sum(g.nbytes(part.num_blocks(n)) for g, part in zip(self.groups, self.empty()))

    def cost(self, x, **options) -> Cost:
        """What a request takes, prompt and longest answer, before it runs."""
        request = Request.of(x, **options)
        n = min(len(self.encode(request)) + request.params.max_tokens, self.model.config.context)
        kv, chunk = self._kv_bytes(n), min(n, self.scheduler.limits.chunk)
        return Cost(self.budget.weights, kv, activations(self.model, self.specs, chunk, 1, kv))

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
                raise BadRequest(f"tokens must be whole numbers in 0..{vocab - 1}, not {shown(t)}")
        if not tokens:
            raise BadRequest("the prompt is empty: it gives no token")
        return tuple(tokens)

    def take(self, id: int) -> list[Event]:
        """What came for a submitted request since it was last asked for; runs no step."""
        return self._desk.collect(id)

    # Whole sequences

    def score(self, tokens: Many[int], chunk: int | None = None) -> mx.array:
        """float32 logits [n, vocab] after each token, computed from nothing, `chunk` tokens at a time."""
        known = self.check_tokens(tokens)
        if len(known) > self.context:
            raise BadRequest(f"{len(known)} tokens to score, the context holds {self.context}")
        if chunk is not None and (not isinstance(chunk, int) or chunk < 1):
            raise BadRequest(f"chunk must be a whole number >= 1, not {chunk!r}")
        seq = self._own(known, self.empty())
        rows, most = [], min(chunk or self.scheduler.limits.chunk, self.scheduler.limits.max_step)
        while seq.length < len(known):
            rows.append(self.feed(seq, min(most, len(known) - seq.length)))  # others may step in between
        with self.exclusive():
            self.runner.flush()
            whole = mx.concatenate(rows) if len(rows) > 1 else rows[0]
            mx.eval(whole)  # here: another thread cannot compute what this one has left undone
        return whole

    def feed(self, seq: Sequence, n: int) -> mx.array:
        """Run the next n known tokens of a sequence the scheduler does not own; their logits, float32 [n, vocab]."""
        with self.exclusive():
            self._check_open()
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
        with self.exclusive():
            return self.store.resume([*tokens, 0]) if self.store is not None else None

    def whole_state(self, tokens: Many[int]) -> SequenceState | None:
        """The state of these tokens but perhaps the last; what the store has let go is computed again."""
        with self.exclusive():
            return self._whole_state(tokens)

    def _whole_state(self, tokens: Many[int]) -> SequenceState | None:
        held = self.state(tokens)
        if self.store is None or not tokens or (held is not None and len(held) >= len(tokens) - 1):
            return held
        known = self.check_tokens(tokens)
        parts, length = (held.parts, len(held)) if held is not None else (self.empty(), 0)
        seq = self._own(known, parts, length)
        most = min(self.scheduler.limits.chunk, self.scheduler.limits.max_step)
        while seq.length < len(known):
            self.feed(seq, min(most, len(known) - seq.length))
        self.scheduler.keep(seq, whole=True)
        self.runner.flush()
        return SequenceState.fit(known, seq.parts)  # not from the store, which has no place for every checkpoint

    def stats(self) -> Stats:
        with self.exclusive():
            return collect(self)


def is_many(x) -> bool:
    return isinstance(x, (list, tuple)) and bool(x) and all(isinstance(r, Request) for r in x)
