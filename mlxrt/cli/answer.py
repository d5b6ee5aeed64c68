"""An answer as it comes: written out piece by piece, timed, and whole again at its end, also when it is stopped.

Knows events and a clock; nothing of models, prompts or sessions.
"""

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..engine.interrupt import Interrupt
from ..engine.output import complete
from ..engine.request import Completion, Event, Finish, SamplingParams, Timings
from .terminal import amount, note

ENDINGS = {Finish.LENGTH: "ended by max_tokens or the context", Finish.CANCELLED: "stopped"}


@dataclass
class Answer:
    shown: bool = True  # written to stdout while it comes
    patient: bool = False  # Ctrl-C waits for the first token, too
    began: float = field(default_factory=time.perf_counter)
    first: float | None = None
    events: list[Event] = field(default_factory=list)

    def follow(self, stream: Iterator[Event]) -> bool:
        """Take the events; False when Ctrl-C came before the last."""
        with Interrupt(lambda: self.patient or bool(self.events)) as interrupt:
            for event in stream:
                self.first = self.first or time.perf_counter()
                self.events.append(event)
                if event.error:
                    raise event.error
                if self.shown and event.text:
                    sys.stdout.write(event.text)
                    sys.stdout.flush()
                if interrupt.asked and not event.finish_reason:
                    return False
        return True

    def end_line(self) -> None:
        """A prompt must not begin in the middle of a line."""
        if self.shown:
            sys.stdout.write("\n")
            sys.stdout.flush()

    def completion(self) -> Completion:
        return complete(self.events)

    def stopped(self, prompt_tokens: int, params: SamplingParams) -> Completion:
        """What had come when it was stopped, in an engine that had nothing cached."""
        now = time.perf_counter()
        timings = Timings(
            prompt_tokens=prompt_tokens,
            generated_tokens=len(self.events),
            first_token_s=(self.first or now) - self.began,
            total_s=now - self.began,
            seed=params.seed if params.temperature > 0 else None,
        )
        return complete([*self.events, Event(0, finish_reason=Finish.CANCELLED, timings=timings)])


def report(done: Completion, peak: int) -> None:
    """The timing line."""
    t = done.timings
    parts = [f"{t.prompt_tokens} prompt tokens", f"{t.cached_tokens} cached"]
    if t.generated_tokens:
        parts += [f"prefill {t.prefill_tps:.1f} tok/s", f"first token {t.first_token_s * 1e3:.0f} ms"]
    parts.append(f"{t.generated_tokens} generated")
    if t.decode_tps:
        parts.append(f"decode {t.decode_tps:.1f} tok/s")
    parts.append(f"peak {amount(peak)}")
    if t.seed is not None:
        parts.append(f"seed {t.seed}")
    if done.finish_reason in ENDINGS:
        parts.append(ENDINGS[done.finish_reason])
    note(" | ".join(parts))
