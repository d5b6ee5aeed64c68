"""OpenAI's older text completions, /v1/completions, and the list of models, /v1/models."""

import secrets
from codecs import getincrementaldecoder
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ..engine.async_engine import AsyncEngine
from ..engine.request import Completion, Event, Logprobs, Request
from ..text import Tokenizer
from .answering import Call, answer, now, open_call, read_body, reply
from .openai_chat import FINISH, IGNORED, KEEP_ALIVE, Usage, read_stream_options, spread, write_end, write_failure
from .options import MAX_CHOICES, read_response_format, read_sampling, read_stop, read_timeout
from .problem import Fields, Problem, encode_json
from .served_models import ServedModel

MAX_PROMPTS = 256


async def list_models(http: HttpRequest) -> Response:
    models = http.app.state.models
    data = [write_model(model, models.created) for model in models.models.values()]
    return reply({"object": "list", "data": data})


async def show_model(http: HttpRequest) -> Response:
    models = http.app.state.models
    model = models.find(http.path_params["name"])
    return reply(write_model(model, models.created))


def write_model(model: ServedModel, created: int) -> dict[str, Any]:
    context = {} if model.engine is None else {"max_model_len": model.engine.engine.context}
    return {"id": model.name, "object": "model", "created": created, "owned_by": "mlxrt", **context}


async def completions(http: HttpRequest) -> Response:
    body = await read_body(http)
    name, include_usage, writer = body.text("model"), read_stream_options(body), TextWriter()

    def make(engine: AsyncEngine) -> Call:
        call, echo, copies = read_completions(body, engine)
        writer.prepare(name or engine.engine.source.name, engine.engine.tokenizer, call, include_usage, echo, copies)
        return call

    return await answer(http, await open_call(http, name, make), writer)


def read_completions(body: Fields, engine: AsyncEngine) -> tuple[Call, list[str], int]:
    """The call, for each answer the text that `echo` puts before it, and how many answers a prompt gets."""
    prompts = read_prompts(body)
    count, logprobs = body.integer("n", 1, MAX_CHOICES) or 1, body.integer("logprobs", 0, 5)
    best_of = body.integer("best_of", 1, MAX_CHOICES)
    if best_of is not None and best_of != count:
        raise body.fail("best_of", f"must equal n ({count}): answers are not ranked")
    if (body.text("suffix") or "") != "":
        raise body.fail("suffix", "is not supported: no text is filled in before a suffix")
    if body.flag("echo") and logprobs is not None:
        raise body.fail("logprobs", "with echo is not supported: no log probabilities of the prompt are given")
    given = {"logprobs": max(logprobs, 1) if logprobs is not None else 0, "stop": read_stop(body, "stop")}
    max_tokens = body.integer("max_tokens", 1)
    params = read_sampling(body, engine, given, 16 if max_tokens is None else max_tokens)  # OpenAI's default
    options: dict[str, Any] = {"params": params, "deadline_s": read_timeout(body), **read_response_format(body)}
    options["cache_salt"] = body.text("cache_salt") or ""
    requests = [r for p in prompts for r in spread(make_request(p, options), count)]
    tokenizer = engine.engine.tokenizer
    echo = (
        [p if isinstance(p, str) else tokenizer.decode(p) for p in prompts]
        if body.flag("echo")
        else [""] * len(prompts)
    )
    body.ignore(*IGNORED)
    stream = body.flag("stream")
    body.finish()
    return Call(requests, stream, body.ignored), [text for text in echo for _ in range(count)], count


def read_prompts(body: Fields) -> list[str | tuple[int, ...]]:
    """A text, a list of texts, tokens, or a list of lists of tokens."""
    value = body.raw("prompt")
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value and all(is_token(t) for t in value):
        return [tuple(value)]
    listed = isinstance(value, list) and 0 < len(value) <= MAX_PROMPTS
    if listed and all(isinstance(p, str) or (isinstance(p, list) and p and all(map(is_token, p))) for p in value):
        return [p if isinstance(p, str) else tuple(p) for p in value]
    raise body.fail("prompt", f"expected a string, a list of token ids, or a list of at most {MAX_PROMPTS} of these")


def is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def make_request(prompt: str | tuple[int, ...], options: dict[str, Any]) -> Request:
    return Request(prompt=prompt, **options) if isinstance(prompt, str) else Request(tokens=prompt, **options)


class TextWriter:
    media_type = "text/event-stream"

    def __init__(self) -> None:
        self.id, self.created, self._usage = f"cmpl-{secrets.token_hex(14)}", now(), Usage()

    def prepare(
        self, model: str, tokenizer: Tokenizer, call: Call, include_usage: bool, echo: list[str], copies: int
    ) -> None:
        """`echo`: the text before each answer; `copies`: answers to each prompt."""
        self._model, self._tokenizer, self._include_usage, self._echo = model, tokenizer, include_usage, echo
        self._copies = copies
        self._top = call.requests[0].params.logprobs
        self._offsets = [TextOffsets(tokenizer, len(text)) for text in echo]
        frame = {"id": self.id, "object": "text_completion", "created": self.created, "model": model}
        self._head = b"data: " + encode_json(frame)[:-1] + b',"choices":['

    def begin(self, prompt_tokens: int) -> bytes:
        return b"".join(self._frame(i, text, None, None) for i, text in enumerate(self._echo) if text)

    def _frame(self, index: int, text: str, finish: str | None, logprobs: Any) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        return self._head + encode_json(choice) + b"]}\n\n"

    def chunk(self, index: int, event: Event) -> bytes:
        self._usage = self._usage.add(event, index // self._copies)
        finish = None if event.finish_reason is None else FINISH[event.finish_reason]
        logprobs = None
        if event.logprobs:
            logprobs = write_text_logprobs(self._tokenizer, [event.logprobs], self._top, self._offsets[index])
        return self._frame(index, event.text, finish, logprobs) if event.text or finish or logprobs else b""

    def end(self) -> bytes:
        return write_end(self._head, self._usage if self._include_usage else None)

    def keep_alive(self) -> bytes:
        return KEEP_ALIVE

    def failure(self, problem: Problem) -> bytes:
        return write_failure(problem)

    def write_body(self, completions: list[Completion]) -> dict[str, Any]:
        choices = [
            {
                "index": i,
                "text": self._echo[i] + done.text,
                "logprobs": write_text_logprobs(self._tokenizer, list(done.logprobs), self._top, self._offsets[i])
                if done.logprobs
                else None,
                "finish_reason": FINISH[done.finish_reason],
            }
            for i, done in enumerate(completions)
        ]
        usage = Usage.of(completions, self._copies).write()
        head = {"id": self.id, "object": "text_completion", "created": self.created, "model": self._model}
        return {**head, "choices": choices, "usage": usage}


class TextOffsets:
    """Where tokens begin in the text of an answer. By their own bytes: the text itself comes later where a token ends
    within a character or may begin a stop string."""

    def __init__(self, tokenizer: Tokenizer, start: int):
        self._tokenizer, self._next = tokenizer, start
        self._decoder = getincrementaldecoder("utf-8")("replace")

    def advance(self, token: int) -> int:
        """Where this token begins, the next one of the answer."""
        at = self._next
        if token not in self._tokenizer.special_ids:  # those are left out of the text
            self._next += len(self._decoder.decode(self._tokenizer.token_bytes(token)))
        return at


def write_text_logprobs(tokenizer: Tokenizer, steps: list[Logprobs], top: int, offsets: TextOffsets) -> dict[str, Any]:
    chosen = [step[0][0] for step in steps]
    best = [sorted(step, key=lambda pair: (-pair[1], pair[0]))[:top] for step in steps]
    return {
        "tokens": [show_token(tokenizer, token) for token in chosen],
        "token_logprobs": [step[0][1] for step in steps],
        "top_logprobs": [{show_token(tokenizer, token): value for token, value in pairs} for pairs in best],
        "text_offset": [offsets.advance(token) for token in chosen],
    }


def show_token(tokenizer: Tokenizer, token: int) -> str:
    raw = tokenizer.token_bytes(token) if token < tokenizer.vocab_size else b""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{b:02x}" for b in raw)
