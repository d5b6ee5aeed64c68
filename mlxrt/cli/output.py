"""Shows a completion: text as it streams, the timing line, or one JSON object. An interrupted one is completed here."""

import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..engine.output import complete
from ..engine.request import Completion, Event, Finish, Logprobs, SamplingParams, Timings
from ..engine.threads import Interrupt
from ..text.parsing import ToolCall
from .terminal import format_bytes, note, paint

log = logging.getLogger("mlxrt")

if TYPE_CHECKING:
    from ..engine.engine import Engine


@dataclass
class StreamPrinter:
    """Prints the events of one stream and keeps them."""

    echo: bool = True  # write the text to stdout
    show_thinking: bool = True
    stop: Callable[[], None] | None = None  # called on Ctrl-C, for a stream that goes on to its last event
    start: float = field(default_factory=time.perf_counter)
    first_token: float | None = None
    events: list[Event] = field(default_factory=list)
    _thinking: bool = False  # reasoning was shown last

    def consume(self, stream: Iterator[Event]) -> bool:
        """Read the stream to its end; False when Ctrl-C came before it."""
        with Interrupt(lambda: self.stop is not None or bool(self.events), self.stop) as interrupt:
            for event in stream:
                self.first_token = self.first_token or time.perf_counter()
                self.events.append(event)
                if event.error:
                    raise event.error
                if self.echo:
                    self._show(event)
                if interrupt.requested and self.stop is None and not event.finish_reason:
                    return False
        return True

    def _show(self, event: Event) -> None:
        """The answer and calls on stdout; reasoning dimmed on stderr, so that a pipe gets the answer alone."""
        if event.note:
            note(event.note)
        if event.kind != "reasoning" and self._thinking:
            self._thinking = False
            sys.stderr.write("\n\n")
            sys.stderr.flush()
        if event.kind == "reasoning" and event.text and self.show_thinking:
            self._thinking = True
            sys.stderr.write(paint(event.text, "dim", sys.stderr))
            sys.stderr.flush()
        elif event.kind == "answer" and event.text:
            sys.stdout.write(event.text)
            sys.stdout.flush()
        elif event.tool_call is not None and event.tool_call.complete is not None:
            print(json.dumps(call_to_dict(event.tool_call.complete), ensure_ascii=False), flush=True)

    def end_line(self) -> None:
        if self.echo:
            sys.stdout.write("\n")
            sys.stdout.flush()

    def completion(self) -> Completion:
        return complete(self.events)

    def interrupted_completion(self, prompt_tokens: int, params: SamplingParams) -> Completion:
        """What had come before Ctrl-C, in an engine that had nothing cached."""
        now = time.perf_counter()
        timings = Timings(
            prompt_tokens=prompt_tokens,
            generated_tokens=sum(event.token is not None for event in self.events),
            first_token_s=(self.first_token or now) - self.start,
            total_s=now - self.start,
            seed=params.seed if params.temperature > 0 else None,
        )
        return complete([*self.events, Event(0, finish_reason=Finish.CANCELLED, timings=timings)])


def describe_end(done: Completion, max_tokens: int) -> str:
    """Why an answer ended, where the model did not end it."""
    if done.finish_reason is Finish.CANCELLED:
        return "stopped"
    if done.finish_reason is not Finish.LENGTH:
        return ""
    return (
        f"ended by max_tokens {max_tokens}" if len(done.tokens) >= max_tokens else "ended by the context, which is full"
    )


def print_timings(done: Completion, peak_memory: int, max_tokens: int) -> None:
    t = done.timings
    parts = [f"{t.prompt_tokens} prompt tokens", f"{t.cached_tokens} cached"]
    if t.generated_tokens:
        parts += [f"prefill {t.prefill_tps:.1f} tok/s", f"first token {t.first_token_s * 1e3:.0f} ms"]
    thought = f", {t.reasoning_tokens} of them reasoning" if t.reasoning_tokens else ""
    parts.append(f"{t.generated_tokens} generated{thought}")
    if t.decode_tps:
        parts.append(f"decode {t.decode_tps:.1f} tok/s")
    parts.append(f"peak {format_bytes(peak_memory)}")
    if t.seed is not None:
        parts.append(f"seed {t.seed}")
    if end := describe_end(done, max_tokens):
        parts.append(end)
    log.info(" | ".join(parts))


def completion_to_dict(engine: "Engine", done: Completion, peak_memory: int) -> dict[str, Any]:
    """The object that `generate --json` prints."""
    t = done.timings
    found: dict[str, Any] = {
        "model": engine.source.name,
        "text": done.text,
        "reasoning": done.reasoning,
        "tool_calls": [call_to_dict(call) for call in done.tool_calls],
        "raw": done.raw,
        "tokens": list(done.tokens),
        "finish_reason": str(done.finish_reason),
        "cached_tokens": done.cached_tokens,
        "seed": t.seed,
        "timings": {
            "prompt_tokens": t.prompt_tokens,
            "cached_tokens": t.cached_tokens,
            "generated_tokens": t.generated_tokens,
            "reasoning_tokens": t.reasoning_tokens,
            "prefill_tps": t.prefill_tps,
            "first_token_ms": t.first_token_s * 1e3,
            "decode_tps": t.decode_tps,
            "total_ms": t.total_s * 1e3,
            "peak_memory_bytes": peak_memory,
        },
    }
    if done.logprobs:
        found["logprobs"] = [logprobs_to_list(engine, step) for step in done.logprobs]
    return found


def call_to_dict(call: ToolCall) -> dict[str, Any]:
    error = {"error": call.error} if call.error else {}
    return {"id": call.id, "name": call.name, "arguments": call.arguments, **error}


def logprobs_to_list(engine: "Engine", step: Logprobs) -> list[dict[str, Any]]:
    """One step's candidates, the chosen token first; minus infinity becomes null, which JSON has."""
    return [
        {
            "token": token,
            "text": engine.tokenizer.decode([token], skip_special=False),
            "logprob": value if math.isfinite(value) else None,
        }
        for token, value in step
    ]
