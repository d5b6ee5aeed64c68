"""A conversation: say, fork, rewind, save, restore.

A session keeps the tokens that were really fed and produced. Where the chat template leaves the history as it was,
only what is new is tokenised, so an answer is never tokenised a second time and differently; where it rewrites the
history (drops earlier reasoning), the template's text counts. What the prefix cache holds is not computed again.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
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
ANSWER = "\ufdd0answer\ufdd1"  # stands for the last answer in a template's output; no text holds these two
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
    prompt: str = ""  # the template's text that was answered
    tokens: tuple[int, ...] = ()  # all that was fed and produced
    end: str = ""  # the text of the token that ended the answer, if one did


@dataclass(frozen=True)
class PromptPlan:
    """The next prompt, and the turns `before` it, less those that were dropped to make it fit."""

    before: tuple[Turn, ...]
    messages: tuple[dict, ...]
    text: str  # the template's
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
        engine, plan = self._session.engine, self._plan
        ended = done.tokens[-1:] if done.tokens[-1] in engine.source.eos else ()
        end = engine.tokenizer.decode(list(ended), skip_special=False)
        messages = (*plan.messages, {"role": "assistant", "content": done.text})
        return Turn(messages, plan.text, plan.tokens + done.tokens, end)


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
        Request.of("x", **{k: v for k, v in self.options.items() if k not in ("tools", "enable_thinking")})
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
        extra: dict[str, Any] = {k: merged.pop(k) for k in ("tools", "enable_thinking") if k in merged}
        plan = self._plan_after(self.turns, text, extra)
        if self.on_overflow == "drop-oldest":
            plan = self._shorten(plan, text, extra, Request.of("x", **merged).params.max_tokens)
        return plan, merged

    def _plan_after(self, turns: Sequence[Turn], text: str, extra: dict[str, Any], dropped: int = 0) -> PromptPlan:
        messages = (*turns[-1].messages, {"role": "user", "content": text})
        rendered = self.engine.tokenizer.render(list(messages), **extra)
        tokens = self._extend_tokens(turns[-1], messages, rendered, extra)
        tokens = tokens or self.engine.tokenizer.encode(rendered, special=False)
        return PromptPlan(tuple(turns), messages, rendered, tuple(tokens), dropped)

    def _shorten(self, plan: PromptPlan, text: str, extra: dict[str, Any], max_tokens: int) -> PromptPlan:
        """Drop as few turns as leave space for the answer, up to a quarter of the context."""
        answer = min(max_tokens, self.engine.context // 4)
        while len(plan.tokens) + answer > self.engine.context and len(plan.before) > 1:
            plan = self._plan_after(drop_oldest(plan.before), text, extra, plan.dropped + 1)
        return plan

    def _extend_tokens(self, last: Turn, messages: tuple[dict, ...], rendered: str, extra: dict) -> list[int] | None:
        """The tokens so far and those of what the template puts after them, if it changes nothing before."""
        tokenizer = self.engine.tokenizer
        if not last.tokens:
            return None
        *before, answer, question = messages
        marked = tokenizer.render([*before, answer | {"content": ANSWER}, question], **extra)
        content = answer["content"]
        if not marked.startswith(last.prompt + ANSWER):
            return None
        if rendered not in (marked.replace(ANSWER, content), marked.replace(ANSWER, content.strip())):
            return None
        rest = marked[len(last.prompt + ANSWER) :]
        return [*last.tokens, *tokenizer.encode(rest.removeprefix(last.end), special=False)]

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
        state = engine.compute_state(self.tokens)
        if state is None:
            raise BadSnapshot("there is nothing to save: no turn is complete, or the prefix cache is off")
        extra = {"turns": [asdict(t) for t in self.turns], "model": engine.source.name}
        try:
            if archive is None:
                engine.save_state(path, state, extra)
            else:
                archive.save(name, lambda to: engine.save_state(to, state, extra), len(self.tokens), engine.source.name)
        except OSError as error:
            raise BadRequest(f"{path} cannot be written: {error.strerror}; nothing was saved") from None

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
    """The turns without the first question and answer. What stays is tokenised anew: it begins differently now."""
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
        and isinstance(fields.get("prompt"), str)
        and isinstance(fields.get("end"), str)
    )
    if not valid:
        raise BadSnapshot(f"{file}: a turn of its conversation is not as mlxrt writes them; it was not used")
    return Turn(tuple(fields["messages"]), fields["prompt"], tuple(fields["tokens"]), fields["end"])
