"""Sampling and format options that all protocols share, read from a body's fields into the engine's own."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..engine.async_engine import AsyncEngine
from ..engine.generation_defaults import read_defaults
from ..engine.request import SamplingParams
from .problem import Fields

MAX_CHOICES = 128
MAX_STOPS = 64
MAX_BIAS = 1024


def read_sampling(
    body: Fields, engine: AsyncEngine, given: Mapping[str, Any], max_tokens: int | None
) -> SamplingParams:
    """OpenAI's names and the usual extensions; what is absent comes from the model's own defaults, else greedy."""
    found: dict[str, Any] = {
        "temperature": body.number("temperature", 0, 1e6),
        "top_p": body.number("top_p", 0, 1),
        "top_k": body.integer("top_k", -1, 1 << 30),
        "min_p": body.number("min_p", 0, 1),
        "presence_penalty": body.number("presence_penalty", -100, 100),
        "frequency_penalty": body.number("frequency_penalty", -100, 100),
        "repetition_penalty": body.number("repetition_penalty", 1e-6, 1e6),
        "seed": body.integer("seed", -(2**63), 2**64 - 1),
        "logit_bias": read_bias(body),
        "stop_token_ids": body.items("stop_token_ids", MAX_STOPS),
        "ignore_eos": body.flag("ignore_eos") or None,
        **given,
    }
    if found["top_k"] == -1:  # how vLLM switches it off
        found["top_k"] = 0
    if found["seed"] is not None:
        found["seed"] %= 2**64
    return make_params(engine, found, max_tokens)


def make_params(engine: AsyncEngine, found: Mapping[str, Any], max_tokens: int | None) -> SamplingParams:
    defaults = read_defaults(dict(engine.engine.source.generation))
    chosen = {name: value for name, value in found.items() if value is not None and value != ()}
    if chosen.get("top_p") == 0:  # the likeliest token only, as other servers take it
        chosen["top_p"] = 1e-9
    limit = engine.engine.context if max_tokens is None else min(max_tokens, engine.engine.context)
    return SamplingParams(**(defaults | chosen), max_tokens=limit)


def read_bias(body: Fields) -> dict[int, float] | None:
    given = body.object("logit_bias")
    if given is None:
        return None
    if len(given) > MAX_BIAS:
        raise body.fail("logit_bias", f"has {len(given)} tokens, at most {MAX_BIAS} are taken")
    found: dict[int, float] = {}
    for token, value in given.items():
        if not token.isascii() or not token.isdecimal() or len(token) > 9:
            raise body.fail("logit_bias", f"{token[:40]!r} is not a token id")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not -100 <= value <= 100:
            raise body.fail("logit_bias", f"the bias of token {token} must be a number in -100..100")
        found[int(token)] = float(value)
    return found


def read_stop(body: Fields, key: str) -> tuple[str, ...]:
    value = body.raw(key)
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(isinstance(s, str) for s in stops):
        raise body.fail(key, f"expected a string, or a list of at most {MAX_STOPS} strings")
    return tuple(s for s in stops if s)


def read_timeout(body: Fields) -> float | None:
    """Seconds until the answer ends with what it has."""
    return body.number("timeout", 1e-3, 1e6)


def choose_tool(fields: Fields, key: str, name: Any, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The tool that must be called, as a field of a Request."""
    if name not in [tool["function"]["name"] for tool in tools]:
        raise fields.fail(key, f"names {str(name)[:80]!r}, which is not among the tools")
    return {"tool_choice": {"type": "function", "function": {"name": name}}}


def choose_effort(fields: Fields, key: str, effort: str | None, engine: AsyncEngine) -> dict[str, Any]:
    """How hard to think, as a variable of the chat template; named among the ignored fields where it has none."""
    if effort is None:
        return {}
    if engine.engine.tokenizer.chat_format.takes("reasoning_effort"):
        return {"reasoning_effort": effort}
    fields.ignored.append(fields.name(key))
    return {}


def read_response_format(body: Fields) -> dict[str, Any]:
    """As a field of a Request; the engine checks what is inside."""
    value = body.object("response_format")
    return {} if value is None or value.get("type") == "text" else {"response_format": value}
