"""One request from the engine's side: its text, its clock, and the events nobody has taken yet."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ..text import Detokenizer, StopMatcher
from .request import Completion, Event, Finish, Logprobs, Sequence, Timings


@dataclass
class Ticket:
    seq: Sequence
    detokenizer: Detokenizer | None
    vocab: int  # ids the detokenizer knows
    matcher: StopMatcher | None
    began: float = field(default_factory=time.perf_counter)
    first: float | None = None
    last: float | None = None
    inbox: deque[Event] = field(default_factory=deque)
    listener: Callable[[Event], None] | None = None  # gets the events instead, on the thread that made them

    def deliver(self, event: Event) -> None:
        if self.listener is not None:
            self.listener(event)
        else:
            self.inbox.append(event)

    def clock(self) -> tuple[float, bool]:
        """A token is here: seconds since the one before, or since the beginning; and whether it is the first."""
        before, now = self.last, time.perf_counter()
        self.first, self.last = self.first or now, now
        return now - (before or self.began), before is None

    def receive(self, token: int, logprobs: Logprobs) -> bool:
        """A token has arrived and its sequence knows of it. True when its text completes a stop string."""
        ending = self.seq.finish
        text, matched = "", False
        if self.detokenizer:
            # A stop token is no text, nor is one of the rows that pad an embedding beyond the vocabulary.
            if ending is not Finish.STOP and token < self.vocab:
                text = self.detokenizer.push(token)
            if ending:
                text += self.detokenizer.finish()
        if self.matcher:
            text, _ = self.matcher.push(text)
            if ending and not self.matcher.matched:
                text += self.matcher.finish()
            matched = self.matcher.matched
        reason = Finish.STOP if matched else ending
        self.deliver(Event(self.seq.id, token, text, reason, logprobs, self.timings() if reason else None))
        return matched

    def end(self, reason: Finish, error: Exception | None = None) -> None:
        """The request is over without another token. Text that was held back comes out, unless it is an error."""
        text = self._rest() if error is None else ""
        self.deliver(Event(self.seq.id, None, text, reason, timings=self.timings(), error=error))

    def _rest(self) -> str:
        """What may have become a character or a stop string, and now does not."""
        text = self.detokenizer.finish() if self.detokenizer else ""
        if self.matcher and not self.matcher.matched:
            text, _ = self.matcher.push(text)
            text += "" if self.matcher.matched else self.matcher.finish()
        return text

    def timings(self) -> Timings:
        seq, now = self.seq, time.perf_counter()
        return Timings(
            prompt_tokens=len(seq.prompt),
            cached_tokens=seq.cached,
            generated_tokens=len(seq.tokens) - len(seq.prompt),
            first_token_s=(self.first or now) - self.began,
            total_s=now - self.began,
            seed=seq.seed if seq.params.temperature > 0 else None,
        )


def complete(events: list[Event]) -> Completion:
    """The events of one request, folded."""
    last = events[-1]
    assert last.finish_reason and last.timings
    chosen = [e for e in events if e.token is not None]
    return Completion(
        text="".join(e.text for e in events),
        tokens=tuple(e.token for e in chosen if e.token is not None),
        finish_reason=last.finish_reason,
        cached_tokens=last.timings.cached_tokens,
        logprobs=tuple(e.logprobs for e in chosen) if any(e.logprobs for e in chosen) else (),
        timings=last.timings,
    )
