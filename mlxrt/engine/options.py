"""The keyword options of the public calls, as types: what an editor completes and a type checker knows.

Their fields are those of `Request`, `SamplingParams` and `EngineConfig`; a test compares them.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, TypedDict, TypeVar, get_type_hints

from ..config import EngineConfig
from .logits import LogitsRow
from .request import Request, SamplingParams

Prompt = str | Request | Sequence[int] | Sequence[Mapping[str, Any]]  # one input of `generate`
# Several, and a list comes out. No Sequence[str]: a str is one.
Prompts = (
    list[str] | tuple[str, ...] | Sequence[Request] | Sequence[Sequence[int]] | Sequence[Sequence[Mapping[str, Any]]]
)
F = TypeVar("F", bound=Callable[..., Any])


class GenerateOptions(TypedDict, total=False):
    """Of `generate`, `stream`, `session` and `say`."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    suppress: Sequence[int]
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    seed: int | None
    logprobs: int
    ignore_eos: bool
    tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool
    template_options: Mapping[str, Any]
    thinking: str
    thinking_budget: int | None
    enable_thinking: bool | None
    on_logits: Callable[[LogitsRow], None] | None
    priority: int
    deadline_s: float | None
    response_format: Mapping[str, Any] | None
    cache_salt: str


class EngineOptions(TypedDict, total=False):
    """Of `load`: the fields of EngineConfig."""

    max_context: int | None
    kv_memory: int | str | None
    memory: int | str | None
    kv: str
    max_kv_size: int | None
    max_running: int
    chunk: int | None
    max_queue: int
    max_stall: int | None
    max_stall_ms: float | None
    ahead: int
    deterministic: bool
    prefix_cache: bool
    disk_cache: str | None
    disk_cache_bytes: int | str
    compile: bool | None
    cuda_graphs: bool | None
    kernels: str
    dtype: str | None
    cpu_activations: str
    dequantise: bool | None
    reasoning_parser: str | None
    tool_parser: str | None
    revision: str | None
    offline: bool
    token: str | None


def spell_out(options: type) -> Callable[[F], F]:
    """Let `help()` and notebooks show every option, and its default, of a function that takes them as keywords."""
    defaults = {
        f.name: f.default_factory() if f.default_factory is not MISSING else f.default
        for owner in (SamplingParams, Request, EngineConfig)
        for f in fields(owner)
    }

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        named = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        keywords = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=hint)
            for name, hint in get_type_hints(options).items()
        ]
        function.__signature__ = signature.replace(parameters=[*named, *keywords])  # type: ignore[attr-defined]
        return function

    return decorate
