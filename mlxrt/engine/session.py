"""A conversation: say, fork, rewind, save, restore.

What the model is fed is what `messages` says: every turn is the chat template's text of all messages, tokenised as a
whole. A stop string that was cut off, an end that the template does not write, reasoning that it drops are not seen
again, and a session answers as `generate(messages)` does. What the prefix cache holds of those tokens is not computed
again: all of them, unless an answer was sampled in other pieces than the tokenizer makes of its text.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ..cache import SequenceState
from ..cache.storage.archive import Archive, is_archive
from ..errors import BadRequest, BadSnapshot
from ..text import Tokenizer
from .core import Source
from .output import RequestStream, complete
from .request import Completion, Event, Finish, Request

OVERFLOW = ("error", "drop-oldest")
TEMPLATE_OPTIONS = ("tools", "enable_thinking")  # for the chat template, the other options of a turn for the request
T = TypeVar("T")


class SessionEngine(Protocol):
    """What a session needs of an engine."""

    source: Source
    context: int
    vocab_size: int

    @property
    def tokenizer(self) -> Tokenizer: ...
    def stream(self, x, **options) -> RequestStream: ...
    def compute_state(self, tokens: Sequence[int]) -> SequenceState | None: ...
    def save_state(self, path: Path, state: SequenceState, extra: dict[str, Any]) -> str: ...
    def load_state(self, path: Path, digest: str | None, parse: Callable[[dict[str, Any]], T]) -> T: ...


@dataclass(frozen=True)
class Turn:
    """The conversation after an answer."""

    messages: tuple[dict, ...] = ()
    tokens: tuple[int, ...] = ()  # all that was fed and produced for the last answer


@dataclass(frozen=True)
class PromptPlan:
    """The next prompt, and the turns `before` it, less those that were dropped to make it fit."""

    before: tuple[Turn, ...]
    messages: tuple[dict, ...]
    tokens: tuple[int, ...]
    dropped: int = 0

    @property
    def note(self) -> str:
        if not self.dropped:
            return ""
        turns = "the oldest turn was" if self.dropped == 1 else f"the {self.dropped} oldest turns were"
        return f"{turns} dropped to fit the context; the conversation goes on with {len(self.tokens)} tokens"


class ReplyRecorder:
    """Records the events of an answer and adds a turn to the session when it is complete."""

    def __init__(self, session: "Session", plan: PromptPlan):
        self._session, self._plan, self._base = session, plan, session.turns[-1]
        self.events: list[Event] = []

    @property
    def dropped_turns(self) -> int:
        return self._plan.dropped

    def record(self, event: Event) -> Event:
        if not self.events and self._plan.dropped:
            event = replace(event, note=self._plan.note)
        self.events.append(event)
        if event.error:
            raise event.error
        if event.finish_reason in (Finish.STOP, Finish.LENGTH):
            self._session.accept(self._base, [*self._plan.before, self._make_turn()])
        return event

    def _make_turn(self) -> Turn:
        done = complete(self.events)
        messages = (*self._plan.messages, {"role": "assistant", "content": done.text})
        return Turn(messages, self._plan.tokens + done.tokens)


class Reply(Iterator[Event]):
    """An answer as it is generated. The session gets its turn when it is complete; closing it early adds none."""

    def __init__(self, session: "Session", plan: PromptPlan, options: dict[str, Any]):
        self._recorder = ReplyRecorder(session, plan)
        self._stream = session.engine.stream(Request.of(list(plan.tokens), **options))

    def __next__(self) -> Event:
        return self._recorder.record(next(self._stream))

    @property
    def events(self) -> list[Event]:
        return self._recorder.events

    @property
    def dropped_turns(self) -> int:
        return self._recorder.dropped_turns

    @property
    def prompt_tokens(self) -> int:
        return self._stream.prompt_tokens

    @property
    def completion(self) -> Completion:
        """The full answer; waits for it."""
        for _ in self:
            continue
        return complete(self.events)

    @property
    def text(self) -> str:
        return self.completion.text

    def close(self) -> None:
        self._stream.close()


class Session:
    def __init__(
        self, engine: SessionEngine, system: str | None = None, options: dict | None = None, on_overflow: str = "error"
    ):
        if on_overflow not in OVERFLOW:
            raise BadRequest(f"on_overflow must be {' or '.join(OVERFLOW)}, not {on_overflow!r}")
        self.engine, self.options, self.on_overflow = engine, dict(options or {}), on_overflow
        Request.of("x", **{k: v for k, v in self.options.items() if k not in TEMPLATE_OPTIONS})
        first = ({"role": "system", "content": system},) if system else ()
        self.turns: list[Turn] = [Turn(first)]

    @property
    def messages(self) -> tuple[dict, ...]:
        return self.turns[-1].messages

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.turns[-1].tokens

    def say(self, text: str, **options) -> Reply:
        """Ask; iterate the reply for its events, or read its `text`."""
        return Reply(self, *self.plan_prompt(text, options))

    def plan_prompt(self, text: str, options: dict[str, Any]) -> tuple[PromptPlan, dict[str, Any]]:
        """The prompt for a user's message, and the options of the request that answers it."""
        if not isinstance(text, str) or not text:
            raise BadRequest("say something: the text is empty")
        merged = self.options | options
        extra: dict[str, Any] = {k: merged.pop(k) for k in TEMPLATE_OPTIONS if k in merged}
        plan = self._plan_after(self.turns, text, extra)
        if self.on_overflow == "drop-oldest":
            plan = self._shorten(plan, text, extra, Request.of("x", **merged).params.max_tokens)
        return plan, merged

    def _plan_after(self, turns: Sequence[Turn], text: str, extra: dict[str, Any], dropped: int = 0) -> PromptPlan:
        messages = (*turns[-1].messages, {"role": "user", "content": text})
        tokens = self.engine.tokenizer.chat(list(messages), **extra)
        return PromptPlan(tuple(turns), messages, tuple(tokens), dropped)

    def _shorten(self, plan: PromptPlan, text: str, extra: dict[str, Any], max_tokens: int) -> PromptPlan:
        """Drop as few turns as leave space for the answer, up to a quarter of the context."""
        answer = min(max_tokens, self.engine.context // 4)
        while len(plan.tokens) + answer > self.engine.context and len(plan.before) > 1:
            plan = self._plan_after(drop_oldest(plan.before), text, extra, plan.dropped + 1)
        return plan

    def accept(self, base: Turn, turns: list[Turn]) -> None:
        """Replace the turns by those that a complete answer leads to, if `base` is still the last."""
        if self.turns[-1] is not base:
            raise BadRequest("the session moved on while this answer was being given; fork it to answer in parallel")
        self.turns = turns

    def fork(self) -> "Session":
        """A session that goes its own way from here. Nothing is copied: both find the same blocks."""
        other = Session(self.engine, None, self.options, self.on_overflow)
        other.turns = list(self.turns)
        return other

    def rewind(self, turns: int = 1) -> None:
        """Forget the last questions and answers."""
        if not isinstance(turns, int) or not 0 <= turns < len(self.turns):
            raise BadRequest(f"cannot rewind {turns!r} turns: the session has {len(self.turns) - 1}")
        del self.turns[len(self.turns) - turns :]

    def save(self, path: str | Path, name: str | None = None) -> None:
        """Write the conversation and its KV state atomically.

        One file; or, given a folder or a name, one state of an archive that holds many."""
        path, engine = Path(path), self.engine
        if not path.parent.is_dir():
            raise BadRequest(f"{path.parent} is no folder to save into")
        archive = Archive(path) if is_archive(path, name) else None
        tokens = self._next_prefix()
        state = engine.compute_state(tokens)
        if state is None:
            raise BadSnapshot("there is nothing to save: no turn is complete, or the prefix cache is off")
        extra = {"turns": [asdict(t) for t in self.turns], "model": engine.source.name}
        try:
            if archive is None:
                engine.save_state(path, state, extra)
            else:
                archive.save(name, lambda to: engine.save_state(to, state, extra), len(tokens), engine.source.name)
        except OSError as error:
            raise BadRequest(f"{path} cannot be written: {error.strerror}; nothing was saved") from None

    def _next_prefix(self) -> tuple[int, ...]:
        """The tokens that the next prompt begins with, whatever is asked: a restored session finds them computed."""
        if not self.tokens:
            return ()
        extra = {k: self.options[k] for k in TEMPLATE_OPTIONS if k in self.options}
        one, other = (self._plan_after(self.turns, text, extra).tokens for text in ("a", "1"))
        same = takewhile(lambda pair: pair[0] == pair[1], zip(one, other))
        return tuple(token for token, _ in same)[: self.engine.context]

    @classmethod
    def restore(
        cls, engine: SessionEngine, path: str | Path, name: str | None = None, on_overflow: str = "error", **options
    ) -> "Session":
        """The session that was saved there; `name` picks one of an archive."""
        session = cls(engine, None, options, on_overflow)
        file, digest = Archive(Path(path)).find(name) if is_archive(Path(path), name) else (Path(path), None)
        session.turns = engine.load_state(file, digest, lambda extra: read_turns(file, extra, engine.vocab_size))
        return session


def drop_oldest(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """The turns without the first question and answer."""
    first, oldest, *rest = turns
    gone = len(oldest.messages)
    return (first, *(Turn(first.messages + turn.messages[gone:]) for turn in rest))


def read_turns(file: Path, extra: dict[str, Any], vocab: int) -> list[Turn]:
    """The turns in a saved state, each checked."""
    turns = extra.get("turns")
    if not isinstance(turns, list) or not turns:
        raise BadSnapshot(f"{file} holds a state without a conversation; it was not used")
    return [read_turn(file, t, vocab) for t in turns]


def read_turn(file: Path, saved: Any, vocab: int) -> Turn:
    fields = saved if isinstance(saved, dict) else {}
    messages, tokens = fields.get("messages"), fields.get("tokens")
    valid = (
        isinstance(messages, list)
        and all(isinstance(m, dict) for m in messages)
        and isinstance(tokens, list)
        and all(type(t) is int and 0 <= t < vocab for t in tokens)
    )
    if not valid:
        raise BadSnapshot(f"{file}: a turn of its conversation is not as mlxrt writes them; it was not used")
    return Turn(tuple(fields["messages"]), tuple(fields["tokens"]))
