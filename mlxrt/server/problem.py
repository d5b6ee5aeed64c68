"""Errors as HTTP clients expect them: a status, a type and a code, in the words that clients match.

Each protocol writes the same `Problem` in its own shape: OpenAI's `{"error": {...}}`, Anthropic's
`{"type": "error", ...}`, Ollama's `{"error": "text"}`.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import ClientDisconnect

from ..errors import (
    BadRequest,
    BadTemplate,
    ContextOverflow,
    EngineClosed,
    EngineFailed,
    MlxrtError,
    NoTokenizer,
    QueueFull,
    WontFit,
)

MAX_RETRY_SECONDS = 60  # clients give up on longer ones
CLIENT_LEFT = 499  # nobody reads it; it is for the log
RETRY_SECONDS = 1  # what a client is told to wait for where nothing better is known
ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    501: "api_error",
    503: "overloaded_error",
}


class Problem(Exception):
    """A request that cannot be answered. Raised anywhere before the first byte; written by the protocol's `write`."""

    def __init__(
        self,
        status: int,
        message: str,
        type: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.type, self.code, self.param = status, message, type, code, param
        self.headers = dict(headers or {})


@dataclass(frozen=True)
class Overflow:
    """The numbers of a prompt that is too long, for the words each protocol's clients look for."""

    prompt: int
    limit: int


def describe(error: BaseException) -> Problem:
    """The problem behind an exception; 500 only for what is a defect of ours."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, ClientDisconnect):
        return Problem(CLIENT_LEFT, "the client has left")
    if isinstance(error, ContextOverflow):
        text = (
            f"This model's maximum context length is {error.limit} tokens. However, your messages resulted in "
            f"{error.prompt} tokens. Please reduce the length of the messages. ({error})"
        )
        problem = Problem(400, text, code="context_length_exceeded", param="messages")
        problem.overflow = Overflow(error.prompt, error.limit)  # type: ignore[attr-defined]
        return problem
    if isinstance(error, (BadRequest, BadTemplate, NoTokenizer)):
        return Problem(400, str(error))
    if isinstance(error, QueueFull):
        return describe_full_queue(error, RETRY_SECONDS)
    if isinstance(error, EngineFailed):
        return Problem(503, str(error), "engine_failed", "engine_failed", headers={"x-should-retry": "false"})
    if isinstance(error, EngineClosed):
        return Problem(503, str(error), "unavailable_error", headers={"retry-after": str(RETRY_SECONDS)})
    if isinstance(error, WontFit):
        return Problem(400, str(error), code="context_length_exceeded")
    if isinstance(error, MlxrtError):
        return Problem(500, str(error), "server_error", headers={"x-should-retry": "false"})
    return Problem(500, f"internal error: {type(error).__name__}", "server_error")


def describe_full_queue(error: QueueFull, seconds: float) -> Problem:
    """`seconds`: until there is likely to be room."""
    wait = str(min(max(1, math.ceil(seconds)), MAX_RETRY_SECONDS))
    return Problem(429, str(error), "rate_limit_error", "queue_full", headers={"retry-after": wait})


def write_openai(problem: Problem, request_id: str) -> dict[str, Any]:
    return {"error": {"message": problem.message, "type": problem.type, "param": problem.param, "code": problem.code}}


def write_anthropic(problem: Problem, request_id: str) -> dict[str, Any]:
    text, overflow = problem.message, getattr(problem, "overflow", None)
    if overflow is not None:
        text = f"prompt is too long: {overflow.prompt} tokens > {overflow.limit} maximum"
    kind = ANTHROPIC_TYPES.get(problem.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": text}, "request_id": request_id}


def write_ollama(problem: Problem, request_id: str) -> dict[str, Any]:
    return {"error": problem.message}


WRITERS = {"openai": write_openai, "anthropic": write_anthropic, "ollama": write_ollama}


def protocol_of(path: str) -> str:
    """Which protocol's shape a path's errors take."""
    if path.startswith("/api/"):
        return "ollama"
    return "anthropic" if path.startswith(("/v1/messages", "/messages")) else "openai"


def encode_json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


@dataclass
class Fields:
    """The fields of a JSON object, taken one by one with their types checked; what is left at the end is unknown."""

    data: dict[str, Any]
    path: str = ""
    ignored: list[str] = field(default_factory=list)
    taken: set[str] = field(default_factory=set)

    def name(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def fail(self, key: str, text: str) -> Problem:
        return Problem(400, f"{self.name(key)}: {text}", param=self.name(key))

    def raw(self, key: str) -> Any:
        """As it came; None where it is absent or null."""
        self.taken.add(key)
        return self.data.get(key)

    def text(self, key: str, choices: tuple[str, ...] = ()) -> str | None:
        value = self.raw(key)
        if value is not None and not isinstance(value, str):
            raise self.fail(key, f"expected a string, not {kind_of(value)}")
        if value is not None and choices and value not in choices:
            raise self.fail(key, f"expected one of {', '.join(choices)}, not {value[:80]!r}")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.raw(key)
        if value is not None and not isinstance(value, bool):
            raise self.fail(key, f"expected true or false, not {kind_of(value)}")
        return default if value is None else value

    def integer(self, key: str, low: int = 0, high: int = 2**63 - 1) -> int | None:
        value = self.raw(key)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high):
            raise self.fail(key, f"expected a whole number in {low}..{high}, not {kind_of(value, show=True)}")
        return value

    def number(self, key: str, low: float = -1e30, high: float = 1e30) -> float | None:
        value = self.raw(key)
        wrong = isinstance(value, bool) or not isinstance(value, (int, float))
        if value is not None and (wrong or not low <= value <= high):
            raise self.fail(key, f"expected a number in {low:g}..{high:g}, not {kind_of(value, show=True)}")
        return value

    def items(self, key: str, longest: int = 1 << 20) -> list[Any] | None:
        value = self.raw(key)
        if value is not None and not isinstance(value, list):
            raise self.fail(key, f"expected a list, not {kind_of(value)}")
        if value is not None and len(value) > longest:
            raise self.fail(key, f"has {len(value)} items, at most {longest} are taken")
        return value

    def object(self, key: str) -> dict[str, Any] | None:
        value = self.raw(key)
        if value is not None and not isinstance(value, dict):
            raise self.fail(key, f"expected an object, not {kind_of(value)}")
        return value

    def inner(self, key: str) -> "Fields | None":
        value = self.object(key)
        return None if value is None else Fields(value, self.name(key), self.ignored)

    def ignore(self, *keys: str) -> None:
        """Fields that clients send and that change nothing here: said in a response header, not refused."""
        for key in keys:
            if self.raw(key) is not None:
                self.ignored.append(self.name(key))

    def ignore_rest(self) -> None:
        """As `ignore`, for all that is left."""
        self.ignore(*sorted(map(str, self.data.keys() - self.taken)))

    def finish(self) -> None:
        if unknown := sorted(map(str, self.data.keys() - self.taken)):
            raise self.fail(unknown[0][:80], "unknown parameter")


def kind_of(value: Any, show: bool = False) -> str:
    kinds = {type(None): "null", bool: "true or false", str: "a string", list: "a list", dict: "an object"}
    if show and isinstance(value, (int, float)) and not isinstance(value, bool):
        return f"{value}"[:40]
    return kinds.get(type(value), "a number")
