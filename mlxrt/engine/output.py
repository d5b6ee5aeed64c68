"""Outputs: sampled tokens become text and events, events reach the threads that wait for them.

The `OutputProcessor` owns the state of every request. A thread that waits for an event drives the engine's steps, one
thread at a time, for all.
"""

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Self

from ..errors import BadRequest, EngineClosed, show
from ..text import StopMatcher
from ..text.parsing import Segment
from .answer_reader import ANSWER, SegmentSource, match_stops
from .request import Completion, EngineEvent, Event, Finish, Logprobs, Timings, check_id, keep_error, read_list
from .sequence import Sequence
from .stats import Metrics
from .thinking_budget import ThinkingBudget

log = logging.getLogger("mlxrt")

IDLE_WAIT = 0.05  # seconds until the next try when all requests left wait for a slow reader in another thread


class EventHook:
    """Calls the user's `on_event` hook; a hook that raises is logged once and disabled."""

    def __init__(self, hook: Callable[[EngineEvent], None] | None):
        self._hook = hook

    def __call__(self, kind: str, seq: Sequence, reason: Finish | None = None) -> None:
        if self._hook is None:
            return
        generated = len(seq.tokens) - len(seq.prompt)
        try:
            self._hook(EngineEvent(kind, seq.id, time.perf_counter(), len(seq.prompt), generated, reason))
        except BaseException as raised:  # a user's code may raise anything; no request may suffer from it
            self._hook = None
            log.warning(f"on_event raised {raised!r}: it is not called any more")
            keep_error(raised)


@dataclass
class RequestState:
    """A request's output: its text, timings, and the events that are not read yet."""

    seq: Sequence
    reader: SegmentSource | None = None  # None: tokens only
    matcher: StopMatcher | None = None
    budget: ThinkingBudget | None = None
    began: float = field(default_factory=time.perf_counter)
    first: float | None = None
    last: float | None = None
    inbox: deque[Event] = field(default_factory=deque)
    listener: Callable[[Event], None] | None = None  # gets the events instead, on the thread that steps
    listener_raised: bool = False

    def deliver(self, event: Event) -> None:
        """Raises what a listener raises, unless the request ends with this event anyway."""
        if self.listener is None:
            self.inbox.append(event)
            return
        try:
            self.listener(event)
        except BaseException as raised:  # a user's code may raise anything; no other request may suffer from it
            if not self.listener_raised:
                log.warning(f"the listener of request {self.seq.id} raised {raised!r}: the request ends")
            self.listener_raised = True
            if event.finish_reason is None:
                raise
            keep_error(raised)

    def record_token(self) -> tuple[float, bool]:
        """A token has arrived: seconds since the one before, or since submission; and whether it is the first."""
        before, now = self.last, time.perf_counter()
        self.first, self.last = self.first or now, now
        return now - (before or self.began), before is None

    def add_token(self, token: int, logprobs: Logprobs) -> bool:
        """Emit a token that the sequence has committed. True when its text completes a stop string."""
        ending, reader = self.seq.finish, self.reader
        if reader is None:
            self._deliver_segments([], token, logprobs, ending)
            return False
        segments = match_stops(
            reader.push(token, ending is Finish.STOP and token in self.seq.stops), self.matcher, last=False
        )
        matched = self.matcher is not None and self.matcher.matched
        if ending or matched:
            segments += match_stops(reader.finish(), self.matcher, last=True)
            matched = self.matcher is not None and self.matcher.matched
        self._deliver_segments(segments, token, logprobs, Finish.STOP if matched else ending)
        if self.budget is not None and not self.seq.finish:
            self.budget.update(self.seq)
        return matched

    def finish(self, reason: Finish, error: Exception | None = None) -> None:
        """End without another token. Text that was held back comes out, unless it is an error."""
        try:
            segments: list[Segment] = []
            if self.reader is not None and error is None:
                segments = match_stops(self.reader.finish(), self.matcher, last=True)
            self._deliver_segments(segments, None, (), reason, error)
        except BaseException as raised:  # what its text or its listener does ends this request only
            self._deliver_segments([], None, (), Finish.ERROR, keep_error(raised))

    def _deliver_segments(
        self,
        segments: list[Segment],
        token: int | None,
        logprobs: Logprobs,
        reason: Finish | None,
        error: Exception | None = None,
    ) -> None:
        """One event for each segment, one at least: the first has the token, the last the reason."""
        segments = segments or [Segment(self.reader.kind if self.reader is not None else ANSWER)]
        for i, segment in enumerate(segments):
            last = i == len(segments) - 1
            self.deliver(
                Event(
                    self.seq.id,
                    None if i else token,
                    segment.text,
                    segment.kind,
                    segment.raw,
                    segment.delta,
                    reason if last else None,
                    () if i else logprobs,
                    self.timings() if last and reason else None,
                    error if last else None,
                    stop_string=self.matcher.matched_stop if last and reason and self.matcher is not None else None,
                )
            )

    def timings(self) -> Timings:
        seq, now = self.seq, time.perf_counter()
        return Timings(
            prompt_tokens=len(seq.prompt),
            cached_tokens=seq.cached,
            generated_tokens=len(seq.tokens) - len(seq.prompt),
            reasoning_tokens=self.reader.reasoning_tokens if self.reader is not None else 0,
            first_token_s=(self.first or now) - self.began,
            total_s=now - self.began,
            seed=seq.seed if seq.params.temperature > 0 else None,
        )


class OutputProcessor:
    """Owns the `RequestState`s and hands their events to waiting threads."""

    def __init__(self, metrics: Metrics, on_event: Callable[[EngineEvent], None] | None = None):
        self.states: dict[int, RequestState] = {}
        self.metrics, self.hook = metrics, EventHook(on_event)
        self._condition = threading.Condition(threading.Lock())
        self._owner_thread: int | None = None  # the thread that steps the engine
        self._closed: Callable[[], EngineClosed] | None = None

    # On the thread that steps

    def add(self, state: RequestState) -> None:
        self.states[state.seq.id] = state
        self.hook("queued", state.seq)

    def process(self, seq: Sequence, token: int, logprobs: Logprobs) -> bool:
        """Emit a committed token. True when its text completes a stop string."""
        state = self.states[seq.id]
        seconds, first = state.record_token()
        if first:
            self.metrics.add_first_token(seconds)
            self.hook("first_token", seq)
        else:
            self.metrics.add_inter_token(seconds)
        return state.add_token(token, logprobs)

    def finish(self, seq: Sequence, reason: Finish, error: Exception | None = None, emit: bool = True) -> None:
        """End a request; `emit` its last event, where no token brought one. Listeners get theirs at once."""
        state = self.states.get(seq.id)
        if state is not None and emit:
            state.finish(reason, error)
        self.record_finish(seq, reason)

    def record_finish(self, seq: Sequence, reason: Finish) -> None:
        """Count a finished request whose last event is out."""
        self.metrics.finished[str(reason)] += 1
        if (state := self.states.get(seq.id)) is not None and state.listener is not None:
            del self.states[seq.id]
        self.hook("finished", seq, reason)

    # On threads that wait

    def wait(self, ids: list[int], step: Callable[[], bool]) -> Event:
        """The next event of any of these requests. A thread that finds no other stepping calls `step` itself."""
        while True:
            with self._condition:
                if event := self._pop(ids):
                    return event
                if self._owner_thread not in (None, threading.get_ident()):  # its own: a callback; `step` refuses that
                    self._condition.wait()
                    continue
                self._owner_thread = threading.get_ident()
            progressed = False
            try:
                progressed = step()
            finally:
                with self._condition:
                    self._owner_thread = None
                    self._condition.notify_all()
                    if not progressed and self._closed is None and not any(self._has_event(id) for id in ids):
                        self._condition.wait(IDLE_WAIT)

    def _has_event(self, id: int) -> bool:
        return id in self.states and bool(self.states[id].inbox)

    def _pop(self, ids: list[int]) -> Event | None:
        if self._closed is not None:
            raise self._closed()
        for id in ids:
            state = self._find(id)
            if state.inbox:
                event = state.inbox.popleft()
                if event.finish_reason:
                    del self.states[id]
                return event
        return None

    def _find(self, id: int) -> RequestState:
        state = self.states.get(id) if isinstance(id, int) else None
        if state is None or state.listener is not None:
            why = "it never was, or all was read" if state is None else "a listener gets them"
            raise BadRequest(f"there are no events of request {show(id)} to read: {why}")
        return state

    def take(self, id: int) -> list[Event]:
        """The events of a request that are not read yet. Runs no step."""
        with self._condition:
            if self._closed is not None:
                raise self._closed()
            inbox = self._find(id).inbox
            events = list(inbox)
            inbox.clear()
            if events and events[-1].finish_reason:
                del self.states[id]
            return events

    def notify(self) -> None:
        """Wake the waiting threads: something may have changed for them."""
        with self._condition:
            self._condition.notify_all()

    def close(self, error: Callable[[], EngineClosed]) -> None:
        """From now on every thread that waits gets this error instead of an event."""
        with self._condition:
            self._closed = self._closed or error
            self._condition.notify_all()


class RequestStream(Iterator[Event]):
    """The events of one call, as an iterator that cancels what is left when it is closed."""

    def __init__(
        self,
        ids: list[int],
        wait: Callable[[list[int], Callable[[], bool]], Event],
        step: Callable[[], bool],
        drop: Callable[[list[int], bool], None],
        prompt_tokens: int = 0,
    ):
        self.ids: list[int] = []
        self.ids += [check_id(id) for id in read_list("ids", ids)]
        self.prompt_tokens = prompt_tokens  # the tokens of all prompts together
        self._wait, self._step, self._drop, self._exhausted = wait, step, drop, False
        self._only = self.ids[0] if len(self.ids) == 1 else None
        self._events: list[Event] = []  # of the only request: what `completion` folds

    def __next__(self) -> Event:
        if not self.ids:
            if not self._exhausted:
                self._exhausted = True
                self._drop([], True)  # deferred work is done now, while no request waits for it
            raise StopIteration
        event = self._wait(self.ids, self._step)
        if event.finish_reason:
            self.ids.remove(event.id)
        if event.id == self._only and event.error is None:  # an error's traceback holds its readers, and this stream
            self._events.append(event)
        return event

    @property
    def completion(self) -> Completion:
        """The whole answer of a stream of one request; reads what is left of it."""
        if self._only is None:
            raise BadRequest("a stream of several requests has no one completion; read_all() gives the events of each")
        if error := next((event.error for event in self if event.error is not None), None):
            try:
                raise error
            finally:
                del error  # its traceback holds this frame
        return complete_only(self._events)

    @property
    def text(self) -> str:
        return self.completion.text

    def __repr__(self) -> str:
        return f"<RequestStream: {len(self.ids)} unfinished, {self.prompt_tokens} prompt tokens>"

    def read_all(self) -> dict[int, list[Event]]:
        """Wait for the end; the events by request."""
        events: dict[int, list[Event]] = {}
        for event in self:
            events.setdefault(event.id, []).append(event)
        return events

    def add(self, id: int) -> None:
        """Another request whose events come here."""
        self.ids.append(check_id(id))
        self._only, self._events = None, []

    def close(self) -> None:
        self._cancel(wait=True)

    def _cancel(self, wait: bool) -> None:
        ids, self.ids = self.ids, []
        if ids:
            self._drop(ids, wait)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def __del__(self, finalizing=sys.is_finalizing):
        if not finalizing():
            self._cancel(wait=False)  # a finaliser runs anywhere, also where this very thread holds a lock


def complete_all(order: list[int], events: dict[int, list[Event]]) -> list[Completion]:
    """The completions of several requests, in order; the first error is raised."""
    for id in order:
        if error := events[id][-1].error:
            events.clear()  # the traceback holds this frame and the caller's: the error must not hang on them
            try:
                raise error
            finally:
                del error
    return [complete(events[id]) for id in order]


def complete_only(events: list[Event]) -> Completion:
    """The completion of one request whose events were read."""
    if not events or not events[-1].finish_reason:
        raise BadRequest("this answer has no end: it failed, or was closed before; ask again")
    return complete(events)


def complete(events: list[Event]) -> Completion:
    """Fold the events of one request."""
    last = events[-1]
    assert last.finish_reason and last.timings
    chosen = [e for e in events if e.token is not None]
    return Completion(
        text="".join(e.text for e in events if e.kind == ANSWER),
        tokens=tuple(e.token for e in chosen if e.token is not None),
        finish_reason=last.finish_reason,
        cached_tokens=last.timings.cached_tokens,
        logprobs=tuple(e.logprobs for e in chosen) if any(e.logprobs for e in chosen) else (),
        timings=last.timings,
        reasoning="".join(e.text for e in events if e.kind == "reasoning"),
        tool_calls=tuple(
            e.tool_call.complete for e in events if e.tool_call is not None and e.tool_call.complete is not None
        ),
        raw="".join(e.raw for e in events),
        stop_string=last.stop_string,
    )
