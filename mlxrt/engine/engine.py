"""The public engine. The Python API, the command line and the benchmarks all come through here."""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Many
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack, overload

import mlx.core as mx

from ..cache import SequenceState
from ..cache.storage.snapshot import load_state, save_state
from ..config import EngineConfig, check_number
from ..errors import BadRequest, ContextOverflow, NoTokenizer, PromptWontFit
from ..models import CausalLM
from ..text import StopMatcher, Tokenizer
from ..text.parsing import OutputParser
from .answer_format import AnswerFormat
from .answer_grammar import AnswerGrammars, Matcher
from .answer_reader import PlainText, SegmentSource
from .core import EngineCore, Source
from .memory import Cost, activation_bytes
from .options import GenerateOptions, Prompt, Prompts, spell_out
from .output import RequestState, RequestStream, complete_all
from .request import Completion, EngineEvent, Event, Request, check_id, read_list
from .sampler import check_params, draw_seed
from .sequence import Sequence
from .session import Session
from .stats import Stats
from .thinking_budget import ThinkingBudget

__all__ = ["Engine", "Source"]

T = TypeVar("T")
PUBLIC = """generate stream submit stream_of step take cancel score cost encode session stats close config context
    model source tokenizer vocab_size""".split()


class Engine:
    """A model that answers requests. Threads may share one."""

    def __init__(
        self,
        model: CausalLM,
        config: EngineConfig = EngineConfig(),  # noqa: B008  frozen
        tokenizer: Tokenizer | None = None,
        source: Source = Source(),  # noqa: B008  frozen
        on_event: Callable[[EngineEvent], None] | None = None,
    ):
        self.model, self.config, self.source, self._tokenizer = model, config, source, tokenizer
        self.core = EngineCore(model, config, tokenizer, source, on_event)
        self.context, self.vocab_size = self.core.context, model.config.vocab_size
        self.answer_format = AnswerFormat(tokenizer, config, dict(source.capabilities))

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's; NoTokenizer where its files have none."""
        if self._tokenizer is None:
            raise NoTokenizer(f"{self.source.name or 'this model'} came without a tokenizer: give and take tokens")
        return self._tokenizer

    @cached_property
    def _grammars(self) -> AnswerGrammars:
        return AnswerGrammars(self.tokenizer, self.answer_format, self.vocab_size, self.source.eos)

    # Requests

    @overload
    def generate(self, x: Prompt, **options: Unpack[GenerateOptions]) -> Completion: ...
    @overload
    def generate(self, x: Prompts, **options: Unpack[GenerateOptions]) -> list[Completion]: ...

    @spell_out(GenerateOptions)
    def generate(self, x: Prompt | Prompts, **options: Unpack[GenerateOptions]) -> Completion | list[Completion]:
        """A Completion for one input (text, tokens, messages, a Request); a list of them for a list of inputs."""
        with self.stream(x, **options) as stream:
            order, events = list(stream.ids), stream.read_all()
        done = complete_all(order, events)
        return done if is_many(x) else done[0]

    @spell_out(GenerateOptions)
    def stream(self, x: Prompt | Prompts, **options: Unpack[GenerateOptions]) -> RequestStream:
        """Events as they come. Closing the stream cancels what is left."""
        requests = read_requests(x, options)
        ids: list[int] = []
        prompt_tokens = 0
        try:
            for request in requests:
                seq = self._submit(request)
                ids.append(seq.id)
                prompt_tokens += len(seq.prompt)
        except BaseException:  # Ctrl-C too: nobody will read what was submitted
            self.core.drop(ids)
            raise
        return self.stream_of(ids, prompt_tokens)

    def stream_prompt(self, request: Request, prompt: tuple[int, ...]) -> RequestStream:
        """The events of a request whose prompt is encoded already."""
        return self.stream_of([self._submit(request, prompt=prompt).id], len(prompt))

    def stream_of(self, ids: list[int], prompt_tokens: int = 0) -> RequestStream:
        """The events of submitted requests; more can be added while it is read."""
        core = self.core
        return RequestStream(ids, core.outputs.wait, core.step, core.drop, prompt_tokens)

    def submit(
        self, request: Request, listener: Callable[[Event], None] | None = None, prompt: tuple[int, ...] | None = None
    ) -> int:
        """Queue a request; its events come from `stream_of`, or to `listener` on the thread that steps.

        `prompt`: its tokens, where they are known already."""
        return self._submit(request, listener, prompt).id

    def _submit(
        self, request: Request, listener: Callable[[Event], None] | None = None, prompt: tuple[int, ...] | None = None
    ) -> Sequence:
        if not isinstance(request, Request):
            raise BadRequest(f"a Request is needed, not {type(request).__name__}; see Request.of")
        if listener is not None and not callable(listener):
            raise BadRequest(f"listener must be a function, not {type(listener).__name__}")
        params, core = request.params, self.core
        check_params(params, self.vocab_size)
        prompt = self.encode(request) if prompt is None else self.check_tokens(prompt)
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.source.eos)
        seed = draw_seed() if params.seed is None else params.seed
        reader = self._build_reader(request, prompt)
        budget = self._build_budget(request, reader)
        grammar = self._build_grammar(request, prompt)
        with core.exclusive():
            core.check_open()
            self._check_fits(len(prompt))
            seq = core.add_request(request, prompt, stops, seed)
            seq.grammar = grammar
            if budget is not None:
                budget.update(seq)
            matcher = StopMatcher(params.stop) if params.stop else None
            core.outputs.add(RequestState(seq, reader, matcher, budget, listener=listener))
        return seq

    def _build_reader(self, request: Request, prompt: tuple[int, ...]) -> SegmentSource | None:
        if self._tokenizer is None and not request.params.stop:
            return None
        return self.answer_format.build_parser(request, prompt) or PlainText(self.tokenizer, prompt)

    def _build_budget(self, request: Request, reader: SegmentSource | None) -> ThinkingBudget | None:
        if request.thinking_budget is None:
            return None
        closing = self.answer_format.closing_tokens(request)
        assert isinstance(reader, OutputParser)
        return ThinkingBudget(reader, request.thinking_budget, closing)

    def compile_grammar(self, request: Request) -> None:
        """Compile what holds a request's answer to its form, ahead of submitting it: that may take a second. BadRequest
        where it cannot be enforced."""
        self._build_grammar(request, ())

    def _build_grammar(self, request: Request, prompt: tuple[int, ...]) -> Matcher | None:
        if request.response_format is None and not request.tools:
            return None
        return self._grammars.build(request, prompt)

    def _check_fits(self, n: int) -> None:
        fits, own = self.core.kv_tokens, self.model.config.context
        if self.context >= own:
            refuse_beyond_context(n, own)
        if n >= self.context == fits < self.model.config.context:
            need, have = self._kv_bytes(n + 1), self._kv_bytes(fits)
            hint = f"its keys and values need {need} bytes, there are {have}: shorten it, or raise kv_memory or memory"
            raise PromptWontFit(n, self.context, hint)

    def _kv_bytes(self, n: int) -> int:
        pools = self.core.pools
        return sum(g.nbytes(part.num_blocks(n)) for g, part in zip(pools.groups, pools.empty_states()))

    @spell_out(GenerateOptions)
    def cost(self, x: Prompt, **options: Unpack[GenerateOptions]) -> Cost:
        """What a request takes, prompt and longest answer, before it runs."""
        request, core = Request.of(x, **options), self.core
        n = min(len(self.encode(request)) + request.params.max_tokens, self.model.config.context)
        kv, chunk = self._kv_bytes(n), min(n, core.scheduler.limits.chunk)
        return Cost(core.memory.weights, kv, activation_bytes(self.model, core.specs, chunk, 1, kv))

    def encode(self, request: Request) -> tuple[int, ...]:
        """A request's prompt as tokens."""
        if not isinstance(request, Request):
            raise BadRequest(f"a Request is needed, not {type(request).__name__}; see Request.of")
        if request.tokens is not None:
            return self.check_tokens(request.tokens)
        return self.check_tokens(encode_text(self.tokenizer, request))

    def check_tokens(self, tokens: Many[int]) -> tuple[int, ...]:
        known, last = read_list("tokens", tokens), self.vocab_size - 1
        if not known:
            raise BadRequest("the prompt is empty: it gives no token")
        if all(type(t) is int and 0 <= t <= last for t in known):
            return known
        return tuple(check_number("tokens", t, int, 0, last, f"whole numbers in 0..{last}") for t in known)

    def step(self) -> bool:
        """One step of the engine, for callers that read with `take`. False when there was nothing to do."""
        return self.core.step()

    def take(self, id: int) -> list[Event]:
        """The events of a submitted request that are not read yet; runs no step."""
        return self.core.outputs.take(id)

    def cancel(self, id: int, wait: bool = True) -> None:
        """End a request now; its reader gets a last event. One that has ended already is left alone.

        Without `wait` the next step ends it, and no lock is taken: a signal handler may call it."""
        self.core.abort(check_id(id), wait)

    # Sequence states

    def score(self, tokens: Many[int], chunk: int | None = None) -> mx.array:
        """float32 logits [n, vocab] after each token, computed without the prefix cache, `chunk` tokens at a time."""
        known, core = self.check_tokens(tokens), self.core
        if len(known) > self.context:
            raise BadRequest(f"{len(known)} tokens to score, the context holds {self.context}")
        if chunk is not None:
            chunk = check_number("chunk", chunk, int, 1, 1 << 31, "a whole number >= 1")
        seq = core.detach(known, core.pools.empty_states())
        rows, most = [], chunk or core.scheduler.limits.chunk
        while seq.length < len(known):
            rows.append(core.feed(seq, min(most, len(known) - seq.length)))  # other threads may step in between
        with core.device_work("scoring"):
            core.runner.flush()
            logits = mx.concatenate(rows) if len(rows) > 1 else rows[0]
            mx.eval(logits)  # here: another thread could not evaluate it
        return logits

    def state(self, tokens: Many[int], salt: str = "") -> SequenceState | None:
        """The longest prefix of these tokens in the prefix cache, pinned."""
        cache = self.core.prefix_cache
        with self.core.exclusive():
            return cache.resume([*tokens, 0], salt) if cache is not None else None

    def compute_state(self, tokens: Many[int], salt: str = "") -> SequenceState | None:
        """The state of these tokens but perhaps the last; what the prefix cache has evicted is computed again."""
        core = self.core
        with core.device_work("computing a state"):
            cached = self.state(tokens, salt)
            if core.prefix_cache is None or not tokens or (cached is not None and len(cached) >= len(tokens) - 1):
                return cached
            known = self.check_tokens(tokens)
            parts, length = (cached.parts, len(cached)) if cached is not None else (core.pools.empty_states(), 0)
            seq = core.detach(known, parts, length, salt)
            most = core.scheduler.limits.chunk
            while seq.length < len(known):
                core.feed(seq, min(most, len(known) - seq.length))
            core.allocator.cache_prefix(seq, partial=True)
            core.runner.flush()
            return SequenceState.fit(known, seq.parts)  # the prefix cache has no node for every checkpoint

    def clear_prefix_cache(self) -> int:
        """Forget every cached prefix that no running request holds; how many nodes there were."""
        core = self.core
        with core.exclusive():
            if core.prefix_cache is None:
                return 0
            count = len(core.prefix_cache)
            core.prefix_cache.clear()
        return count

    def save_state(self, path: Path, state: SequenceState, extra: dict[str, Any]) -> str:
        """Write a state and `extra` to a file; its digest."""
        core = self.core
        with core.device_work("saving a state"):
            core.runner.flush()
            return save_state(path, core.pools, state, core.identity(), extra)

    def load_state(self, path: Path, digest: str | None, parse: Callable[[dict[str, Any]], T], salt: str = "") -> T:
        """Load a state into the prefix cache, once `parse` has accepted what was saved with it; what `parse` gave."""
        core = self.core
        if core.prefix_cache is None:
            raise BadRequest("the engine runs without a prefix cache: a state cannot be restored into it")
        with core.device_work("loading a state"):
            core.runner.flush()
            empty, evict = core.pools.empty_states(), core.prefix_cache.evict
            state, extra = load_state(path, core.pools, empty, core.identity(), digest, evict)
            parsed = parse(extra)
            core.prefix_cache.insert(state, salt=salt)
        return parsed

    @spell_out(GenerateOptions)
    def session(
        self, system: str | None = None, on_overflow: str = "error", **options: Unpack[GenerateOptions]
    ) -> Session:
        """A conversation; options are those of `generate`, for every turn.

        `on_overflow`, when the context is full: error, drop-oldest or summarize."""
        return Session(self, system, dict(options), on_overflow)

    def stats(self) -> Stats:
        """What runs and waits, the KV cache's blocks, and what was reused, evicted and preempted so far."""
        return self.core.stats()

    def close(self) -> None:
        """End every request and free the memory. Threads that wait for one get EngineClosed."""
        self.core.close()

    def __repr__(self) -> str:
        return f"<Engine {self.source.name or type(self.model).__name__}, {self.context} tokens of context>"

    def __dir__(self) -> Iterable[str]:
        """The public names; the others are for the command line and the benchmarks."""
        return sorted(PUBLIC)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def encode_text(tokenizer: Tokenizer, request: Request) -> list[int]:
    """The tokens of a request's prompt or messages."""
    if request.prompt is not None:
        return tokenizer.encode(request.prompt)
    return tokenizer.chat(
        list(request.messages or ()),
        tools=request.tools if request.tool_choice != "none" else None,
        thinking=request.thinking,
        template_options=request.template_options,
    )


def refuse_beyond_context(n: int, own: int) -> None:
    if n >= own:
        raise ContextOverflow(n, own, "shorten the prompt: this is the model's own limit")


def is_many(x: object) -> bool:
    """Whether x is several inputs: a list of texts, Requests, lists of tokens or lists of messages."""
    return isinstance(x, (list, tuple)) and bool(x) and all(isinstance(r, (Request, str, list, tuple)) for r in x)


def read_requests(x: Any, options: Mapping[str, Any]) -> list[Request]:
    """The requests of an input, or of several."""
    return [Request.of(r, **options) for r in (x if is_many(x) else [x])]
