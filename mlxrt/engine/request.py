"""Requests, sampling parameters, events and completions: the public data. No device, no tokenizer, no model."""

import math
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from ..config import check_number
from ..errors import BadRequest, show
from ..text.parsing.segments import ToolCall, ToolCallDelta
from ..text.response_format import ResponseFormat
from ..text.thinking import merge_thinking

TOOL_CHOICES = ("auto", "none", "required")
Logprobs = tuple[tuple[int, float], ...]  # (token, log probability), the chosen token first


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen. Order: penalties, bias, suppression, temperature, top-k, top-p, min-p."""

    max_tokens: int = 256  # -1: to the end of the context
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over output only
    frequency_penalty: float = 0.0  # over output only
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    suppress: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None  # None: one is drawn and reported
    logprobs: int = 0
    ignore_eos: bool = False

    def __post_init__(self):
        put = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731  normalises a frozen object
        put("stop", (self.stop,) if isinstance(self.stop, str) else read_list("stop", self.stop))
        put("suppress", read_list("suppress", self.suppress))
        put("stop_token_ids", read_list("stop_token_ids", self.stop_token_ids))
        if not isinstance(self.logit_bias, Mapping | None):
            raise BadRequest(f"logit_bias must be a dict of token ids and numbers, not {show(self.logit_bias)}")
        put("logit_bias", self.logit_bias or {})
        if self.max_tokens == -1:
            put("max_tokens", MAX_TOKENS)
        for name, (kind, low, high, text) in RANGES.items():
            put(name, check_number(name, getattr(self, name), kind, low, high, text))
        if self.seed is not None:
            put("seed", check_number("seed", self.seed, int, 0, 2**64 - 1, "an integer in 0..2^64-1"))
        for name in ("suppress", "stop_token_ids"):
            put(name, tuple(check_number(name, t, int, 0, 2**31 - 1, "token ids") for t in getattr(self, name)))
        bias = {}
        for token, value in self.logit_bias.items():
            key = check_number("logit_bias", token, int, 0, 2**31 - 1, "token ids as keys")
            bias[key] = check_number("logit_bias", value, float, -1e30, 1e30, "finite numbers as values")
        put("logit_bias", bias)
        if not isinstance(self.ignore_eos, bool):
            raise BadRequest(f"ignore_eos must be True or False, not {show(self.ignore_eos)}")
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise BadRequest(f"stop must be one or more non-empty strings, not {show(self.stop)}")


MAX_TOKENS = 2**31  # the context ends before
RANGES: dict[str, tuple[type, float, float, str]] = {
    "max_tokens": (int, 1, MAX_TOKENS, "a whole number >= 1, or -1: to the end of the context"),
    "temperature": (float, 0, 1e6, "in 0..1000000"),
    "top_k": (int, 0, 2**31, "a whole number >= 0 (0: off)"),
    "top_p": (float, math.ulp(0.0), 1, "in (0, 1]"),
    "min_p": (float, 0, 1, "in [0, 1]"),
    "repetition_penalty": (float, math.ulp(0.0), 1e6, "> 0, at most 1000000"),
    "presence_penalty": (float, -1e6, 1e6, "in -1000000..1000000"),
    "frequency_penalty": (float, -1e6, 1e6, "in -1000000..1000000"),
    "logprobs": (int, 0, 1024, "in 0..1024"),
}


def read_list(name: str, values) -> tuple:
    """The values of an option that takes several; None is none."""
    if values is None:
        return ()
    if isinstance(values, (str, bytes, Mapping)):
        raise BadRequest(f"{name} must be a list, not {show(values)}")
    try:
        return tuple(values)
    except TypeError:
        raise BadRequest(f"{name} must be a list, not {show(values)}") from None


def check_id(id: int) -> int:
    return check_number("id", id, int, 0, 1 << 62, "the number of a request")


@dataclass(frozen=True)
class Request:
    """Exactly one of prompt (raw text), tokens, messages (through the chat template)."""

    prompt: str | None = None
    tokens: tuple[int, ...] | None = None
    messages: tuple[dict, ...] | None = None
    params: SamplingParams = SamplingParams()
    tools: tuple[Any, ...] | None = None  # OpenAI's form, or Python functions
    tool_choice: str | Mapping[str, Any] = "auto"  # or "none" (not offered), "required", a tool's name
    parallel_tool_calls: bool = True  # False: at most one call, where calls can be enforced
    template_options: Mapping[str, Any] = field(default_factory=dict)  # variables of the chat template
    thinking: str = "auto"  # or "on", "off"
    thinking_budget: int | None = None  # tokens of reasoning, then it is ended
    enable_thinking: bool | None = None  # an alias of thinking
    on_logits: Callable[[Any], None] | None = None  # gets the row of the step's LogitsView before sampling
    priority: int = 0  # higher goes first; waiting makes up for it (see docs/serving.md)
    deadline_s: float | None = None  # seconds from submission; then it ends with what it has
    response_format: Any = None  # the form of the answer: see text/response_format.py
    cache_salt: str = ""  # prefixes are shared only among requests with the same one

    def __post_init__(self):
        put = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731  normalises a frozen object
        put("priority", check_number("priority", self.priority, int, -1000, 1000, "a whole number in -1000..1000"))
        if self.response_format is not None:
            put("response_format", ResponseFormat.parse(self.response_format))
        if not isinstance(self.cache_salt, str):
            raise BadRequest(f"cache_salt must be a str, not {type(self.cache_salt).__name__}")
        if self.deadline_s is not None:
            put("deadline_s", check_number("deadline_s", self.deadline_s, float, math.ulp(0.0), 1e9, "seconds > 0"))
        if not isinstance(self.params, SamplingParams):
            raise BadRequest(f"params must be SamplingParams, not {type(self.params).__name__}")
        if self.on_logits is not None and not callable(self.on_logits):
            raise BadRequest(f"on_logits must be a function, not {type(self.on_logits).__name__}")
        given = [n for n in ("prompt", "tokens", "messages") if getattr(self, n) is not None]
        if len(given) != 1:
            raise BadRequest(f"a request needs exactly one of prompt, tokens, messages; got {given or 'none'}")
        [name] = given
        value = getattr(self, name)
        if isinstance(value, str) != (name == "prompt") or isinstance(value, (bytes, bytearray, Mapping)):
            wanted = {"prompt": "a str", "tokens": "a list of token ids", "messages": "a list of dicts"}[name]
            raise BadRequest(f"{name} must be {wanted}, not {type(value).__name__}")
        value = value if name == "prompt" else read_list(name, value)
        if len(value) == 0:
            raise BadRequest(f"the {name} is empty; give at least one {'character' if name == 'prompt' else name[:-1]}")
        put(name, value)
        if self.tools is not None:
            put("tools", read_list("tools", self.tools))
        self._check_tool_choice()
        if not isinstance(self.parallel_tool_calls, bool):
            raise BadRequest(f"parallel_tool_calls must be True or False, not {show(self.parallel_tool_calls)}")
        if not isinstance(self.template_options, Mapping):
            raise BadRequest(f"template_options must be a dict, not {type(self.template_options).__name__}")
        if self.thinking_budget is not None:
            budget = check_number("thinking_budget", self.thinking_budget, int, 0, 2**31, "a whole number >= 0")
            put("thinking_budget", budget)
        put("thinking", merge_thinking(self.thinking, self.enable_thinking))
        if self.messages is None and self.thinking == "auto" and not self.template_options and self.tools is None:
            return
        if self.messages is None:
            raise BadRequest("tools, thinking and template_options go through the chat template: give messages")
        if self.thinking == "off" and self.thinking_budget:
            raise BadRequest(f"thinking is off and thinking_budget is {self.thinking_budget}; give one of the two")

    def _check_tool_choice(self) -> None:
        choice: Any = self.tool_choice
        if isinstance(choice, Mapping):  # as OpenAI writes it
            function = choice.get("function")
            choice = function.get("name") if isinstance(function, Mapping) else choice.get("name")
        if not isinstance(choice, str) or not choice:
            known = f"{', '.join(TOOL_CHOICES)} or a tool's name"
            raise BadRequest(f"tool_choice must be {known}, not {show(self.tool_choice)}")
        object.__setattr__(self, "tool_choice", choice)
        if choice not in ("auto", "none") and not self.tools:
            raise BadRequest(f"tool_choice is {choice!r:.40} and there are no tools")

    @classmethod
    def of(cls, x, **options) -> "Request":
        """What `generate` accepts: str, tokens, messages or a Request; options of SamplingParams and Request."""
        sampling = {f.name for f in fields(SamplingParams)}
        extra = {f.name for f in fields(cls)} - {"prompt", "tokens", "messages", "params"}
        if unknown := options.keys() - sampling - extra:
            raise BadRequest(
                f"unknown option {', '.join(sorted(unknown))}; known: {', '.join(sorted(sampling | extra))}"
            )
        if isinstance(x, cls):
            if options:
                raise BadRequest("a Request carries its own options; give them there")
            return x
        rest = {k: v for k, v in options.items() if k in extra}
        params = SamplingParams(**{k: v for k, v in options.items() if k in sampling})
        return cls(**{kind(x): x}, params=params, **rest)


def kind(x) -> str:
    """Which field of a Request x goes to."""
    if isinstance(x, str):
        return "prompt"
    if isinstance(x, Mapping):
        raise BadRequest("messages come as a list: give [message], not the message itself")
    try:
        first = None if isinstance(x, (bytes, bytearray, memoryview)) else next(iter(x), 0)
    except TypeError:
        first = None
    if first is None or isinstance(first, (str, bytes)):
        of = "" if first is None else f" of {type(first).__name__}"
        raise BadRequest(f"cannot generate from {type(x).__name__}{of}; give a str, tokens, messages or a Request")
    return "messages" if isinstance(first, Mapping) else "tokens"


def keep_error(raised: BaseException) -> Exception:
    """What a request's own code raised, as an error that may outlive the step. What ends the program is raised on.

    Its traceback becomes a note: the frames would keep alive what the threads that stepped hold, so that a stream
    somebody drops would not be deleted. `asyncio.CancelledError` is no Exception, and would pass every handler.
    """
    if isinstance(raised, (KeyboardInterrupt, SystemExit)):
        raise raised
    kept = raised if isinstance(raised, Exception) else BadRequest(f"a callback raised {raised!r}")
    if raised.__traceback__ is not None:
        kept.add_note("Raised inside a step:\n" + "".join(traceback.format_tb(raised.__traceback__)).rstrip())
    return kept.with_traceback(None)


class Finish(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"


@dataclass(frozen=True)
class Timings:
    """Seconds and counts of one request."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    reasoning_tokens: int = 0  # of the generated ones
    first_token_s: float = 0.0  # from submission
    total_s: float = 0.0
    seed: int | None = None  # the seed used, drawn or given; None when greedy

    def __repr__(self) -> str:
        prompt = f"{self.prompt_tokens} prompt tokens ({self.cached_tokens} cached) at {self.prefill_tps:.1f}/s"
        seed = f", seed {self.seed}" if self.seed is not None else ""
        answer = f"{self.generated_tokens} generated at {self.decode_tps:.1f}/s"
        return f"Timings({prompt}, {answer}, {self.total_s:.2f} s{seed})"

    @property
    def prefill_tps(self) -> float:
        return (self.prompt_tokens - self.cached_tokens) / self.first_token_s if self.first_token_s else 0.0

    @property
    def decode_tps(self) -> float:
        spent = self.total_s - self.first_token_s
        return (self.generated_tokens - 1) / spent if spent > 0 and self.generated_tokens > 1 else 0.0


@dataclass(frozen=True)
class Event:
    """One token of one request, or what else became certain with it.

    `text` is empty while a character, a marker, a call or a stop is incomplete. A token with which several things end
    gives several events: the first has the token, the last the finish_reason.
    """

    id: int
    token: int | None = None  # None where one follows another of the same token, or a request ends without one
    text: str = ""
    kind: str = "answer"  # or "reasoning", "tool_call"
    raw: str = ""  # everything the model wrote, special tokens written out
    tool_call: ToolCallDelta | None = None  # more of a call; its last piece has the `complete` one
    finish_reason: Finish | None = None
    logprobs: Logprobs = ()
    timings: Timings | None = None  # on the last event
    error: Exception | None = None
    note: str = ""  # on the first event: what was done to the conversation so that it could be answered
    stop_string: str | None = None  # on the last event: which of the stop strings ended the answer


@dataclass(frozen=True)
class EngineEvent:
    """What happened to a request, for the `on_event` hook."""

    kind: str  # queued, started, first_token, preempted, finished
    id: int
    at: float  # on time.perf_counter
    prompt_tokens: int
    generated_tokens: int
    finish_reason: Finish | None = None


@dataclass(frozen=True)
class Completion:
    """A whole answer."""

    text: str  # the answer alone
    tokens: tuple[int, ...]
    finish_reason: Finish
    cached_tokens: int
    logprobs: tuple[Logprobs, ...]
    timings: Timings
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    raw: str = ""  # everything the model wrote, special tokens written out
    stop_string: str | None = None  # which of the stop strings ended the answer

    def to_message(self) -> dict[str, Any]:
        """The answer as a message for the next request."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in self.tool_calls
            ]
        return message

    def __repr__(self) -> str:
        end = f"finish_reason={self.finish_reason!s}"
        return f"Completion({show(self.text)}, {len(self.tokens)} tokens, {end}, {self.timings})"
