"""A conversation: say, fork, rewind, save, restore.

What the model is fed is what `messages` says: every turn is the chat template's text of all messages, tokenised as a
whole. A stop string that was cut off, an end that the template does not write, reasoning that it drops are not seen
again, and a session answers as `generate(messages)` does. What the prefix cache holds of those tokens is not computed
again: all of them, unless an answer was sampled in other pieces than the tokenizer makes of its text.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from os import PathLike, fsencode
from pathlib import Path
from typing import Any, Protocol, TypeVar, Unpack

from ..cache import SequenceState
from ..cache.storage.archive import Archive, is_archive
from ..config import check_number
from ..errors import BadRequest, BadSnapshot, show
from ..text import Tokenizer
from .core import Source
from .options import GenerateOptions, spell_out
from .output import RequestStream, complete_only
from .overflow import OVERFLOW, SUMMARY_SHARE, Shortened, Turn, drop_oldest, make_summary, set_summary
from .request import Completion, Event, Finish, Request

T = TypeVar("T")


class SessionEngine(Protocol):
    """What a session needs of an engine."""

    source: Source
    context: int
    vocab_size: int

    @property
    def tokenizer(self) -> Tokenizer: ...
    def encode(self, request: Request) -> tuple[int, ...]: ...
    def generate(self, x: Request) -> Completion: ...
    def stream_prompt(self, request: Request, prompt: tuple[int, ...]) -> RequestStream: ...
    def cancel(self, id: int, wait: bool = True) -> None: ...
    def compute_state(self, tokens: Sequence[int], salt: str = "") -> SequenceState | None: ...
    def save_state(self, path: Path, state: SequenceState, extra: dict[str, Any]) -> str: ...
    def load_state(self, path: Path, digest: str | None, parse: Callable[[dict[str, Any]], T], salt: str = "") -> T: ...


@dataclass(frozen=True)
class PromptPlan:
    """The next prompt, and the turns `before` it, less those that had to go to make it fit."""

    before: tuple[Turn, ...]
    request: Request
    tokens: tuple[int, ...]
    dropped: int = 0
    summary: str = ""  # of the turns that are gone
    refused: str = ""  # why there is no summary

    @property
    def messages(self) -> tuple[dict, ...]:
        return self.request.messages or ()

    @property
    def note(self) -> str:
        if not self.dropped:
            return ""
        turns = "the oldest turn was" if self.dropped == 1 else f"the {self.dropped} oldest turns were"
        done = "replaced by a summary" if self.summary else "dropped"
        why = f" ({self.refused})" if self.refused else ""
        return f"{turns} {done} to fit the context{why}; the conversation goes on with {len(self.tokens)} tokens"


class ReplyRecorder:
    """Records the events of an answer and adds a turn to the session when it is complete."""

    def __init__(self, session: "Session", plan: PromptPlan):
        self._session, self._plan, self._base = session, plan, session.turns[-1]
        self.events: list[Event] = []
        self.stopped = False  # by the reader, who keeps what came

    @property
    def dropped_turns(self) -> int:
        return self._plan.dropped

    def record(self, event: Event) -> Event:
        if not self.events and self._plan.dropped:
            event = replace(event, note=self._plan.note)
        if event.error:
            try:
                raise event.error
            finally:
                del event  # the traceback holds this frame: the error would hold itself
        self.events.append(event)
        kept = (
            self.stopped and event.finish_reason is Finish.CANCELLED and any(e.token is not None for e in self.events)
        )
        if kept or event.finish_reason in (Finish.STOP, Finish.LENGTH):
            self._session.accept(self._base, [*self._plan.before, self._make_turn()])
        return event

    def complete(self) -> Completion:
        """The full answer."""
        return complete_only(self.events)

    def describe(self) -> str:
        reason = self.events[-1].finish_reason if self.events else None
        return f"{sum(e.token is not None for e in self.events)} tokens read, {reason or 'not at its end'}"

    def _make_turn(self) -> Turn:
        done = self.complete()
        messages = (*self._plan.messages, done.to_message())
        salt = self._plan.request.cache_salt
        return Turn(messages, self._plan.tokens + done.tokens, self._plan.before[-1].summary, salt)


class Reply(Iterator[Event]):
    """An answer as it is generated. The session gets its turn when it is complete or stopped; closing it adds none."""

    def __init__(self, session: "Session", plan: PromptPlan):
        self._engine, self._recorder = session.engine, ReplyRecorder(session, plan)
        self._stream = session.engine.stream_prompt(plan.request, plan.tokens)

    def __next__(self) -> Event:
        return self._recorder.record(next(self._stream))

    @property
    def events(self) -> list[Event]:
        """Those that were read."""
        return self._recorder.events

    @property
    def dropped_turns(self) -> int:
        """Turns that were given up to fit the context."""
        return self._recorder.dropped_turns

    @property
    def prompt_tokens(self) -> int:
        """Of the conversation so far and the question."""
        return self._stream.prompt_tokens

    @property
    def completion(self) -> Completion:
        """The full answer; waits for it."""
        for _ in self:
            continue
        return self._recorder.complete()

    @property
    def text(self) -> str:
        """The full answer's; waits for it."""
        return self.completion.text

    def stop(self, wait: bool = True) -> None:
        """End the answer here: its last event follows, and what came is kept. Before a first token nothing is.

        Without `wait` the next step ends it, and no lock is taken: a signal handler may call it."""
        self._recorder.stopped = True
        for id in list(self._stream.ids):
            self._engine.cancel(id, wait)

    def close(self) -> None:
        """End the answer here; neither it nor its question is kept."""
        self._stream.close()

    def __repr__(self) -> str:
        return f"<Reply: {self._recorder.describe()}, {self.prompt_tokens} prompt tokens>"


class Session:
    """A conversation: its messages, and keys and values of all that was said, which the next turn goes on from."""

    def __init__(
        self, engine: SessionEngine, system: str | None = None, options: dict | None = None, on_overflow: str = "error"
    ):
        if not isinstance(on_overflow, str) or on_overflow not in OVERFLOW:
            raise BadRequest(f"on_overflow must be {' or '.join(OVERFLOW)}, not {show(on_overflow)}")
        if not isinstance(system, str | None):
            raise BadRequest(f"system must be a text, not {type(system).__name__}")
        self.engine, self.options, self.on_overflow = engine, dict(options or {}), on_overflow
        salt = Request.of([{"role": "user", "content": "x"}], **self.options).cache_salt
        first = ({"role": "system", "content": system},) if system else ()
        self.turns: list[Turn] = [Turn(first, salt=salt)]

    @property
    def messages(self) -> tuple[dict, ...]:
        """The conversation so far."""
        return self.turns[-1].messages

    @property
    def tokens(self) -> tuple[int, ...]:
        """The last prompt and its answer."""
        return self.turns[-1].tokens

    @property
    def summary(self) -> str:
        """What is left of turns that were summarized to fit the context."""
        return self.turns[-1].summary

    def __repr__(self) -> str:
        count = len(self.turns) - 1
        return f"<Session: {count} turn{'' if count == 1 else 's'}, {len(self.tokens)} tokens>"

    @spell_out(GenerateOptions)
    def say(
        self, x: str | Mapping[str, Any] | Sequence[Mapping[str, Any]], **options: Unpack[GenerateOptions]
    ) -> Reply:
        """Ask; iterate the reply for its events, or read its `text`. `x`: text, or messages, such as tools' results."""
        return Reply(self, self.plan_prompt(x, dict(options)))

    def plan_prompt(
        self, x: str | Mapping[str, Any] | Sequence[Mapping[str, Any]], options: dict[str, Any]
    ) -> PromptPlan:
        """The prompt for a user's message, and the request that answers it."""
        new, merged = read_new_messages(x), self.options | options
        plan = self._plan_after(self.turns, new, merged)
        return plan if self.on_overflow == "error" else self._shorten(plan, new, merged)

    def _plan_after(self, turns: Sequence[Turn], new: tuple[dict, ...], options: dict[str, Any]) -> PromptPlan:
        request = Request.of([*turns[-1].messages, *new], **options)
        return PromptPlan(tuple(turns), request, self.engine.encode(request))

    def _shorten(self, plan: PromptPlan, new: tuple[dict, ...], options: dict[str, Any]) -> PromptPlan:
        """Give up as few turns as leave space for the answer, up to a quarter of the context, and for a summary."""
        context, whole = self.engine.context, plan
        answer = min(plan.request.params.max_tokens, context // 4)
        if len(plan.tokens) + answer <= context:
            return plan
        if self.on_overflow == "summarize":
            answer += context // SUMMARY_SHARE
        short = Shortened(plan.before)
        while len(plan.tokens) + answer > context and not (is_tool_result(new) and len(short.turns) <= 2):
            left = drop_oldest(short)
            if left is None:
                break
            short, plan = left, self._plan_after(left.turns, new, options)
        if self.on_overflow == "drop-oldest" or not short.count:
            return replace(plan, dropped=short.count)
        salt = plan.request.cache_salt
        summary, refused = make_summary(self.engine, whole.before[0].messages, short.dropped, salt)
        if summary:
            plan = self._plan_after(set_summary(short.turns, summary), new, options)
        return replace(plan, dropped=short.count, summary=summary, refused=refused)

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
        most = len(self.turns) - 1
        turns = check_number("turns", turns, int, 0, most, f"a whole number (the session has {most})")
        del self.turns[len(self.turns) - turns :]

    def save(self, path: str | Path, name: str | None = None) -> None:
        """Write the conversation and its KV state atomically.

        One file; or, given a folder or a name, one state of an archive that holds many."""
        path, engine = read_path(path, name), self.engine
        if not path.parent.is_dir():
            raise BadRequest(f"{path.parent} is no folder to save into")
        archive = Archive(path) if is_archive(path, name) else None
        tokens = self._next_prefix()
        state = engine.compute_state(tokens, self.turns[-1].salt)
        if state is None:
            raise BadSnapshot("there is nothing to save: no turn is complete, or the prefix cache is off")
        turns = [{k: v for k, v in asdict(turn).items() if k != "salt"} for turn in self.turns]
        extra = {"turns": turns, "model": engine.source.name}
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
        asked = (({"role": "user", "content": text},) for text in ("a", "1"))
        one, other = (self._plan_after(self.turns, new, self.options).tokens for new in asked)
        same = takewhile(lambda pair: pair[0] == pair[1], zip(one, other))
        return tuple(token for token, _ in same)[: self.engine.context]

    @classmethod
    def restore(
        cls,
        engine: SessionEngine,
        path: str | Path,
        name: str | None = None,
        on_overflow: str = "error",
        **options: Unpack[GenerateOptions],
    ) -> "Session":
        """The session that was saved there; `name` picks one of an archive."""
        session = cls(engine, None, dict(options), on_overflow)
        path = read_path(path, name)
        file, digest = Archive(path).find(name) if is_archive(path, name) else (path, None)
        salt = session.turns[0].salt
        session.turns = engine.load_state(
            file, digest, lambda extra: read_turns(file, extra, engine.vocab_size, salt), salt
        )
        return session


def read_path(path: str | Path, name: str | None) -> Path:
    if not isinstance(name, str | None):
        raise BadRequest(f"the name of a state must be a str, not {show(name)}")
    if not isinstance(path, (str, PathLike)) or not is_file_name(str(path)):
        raise BadRequest(f"the name of a file or a folder is needed, not {show(path)}")
    return Path(path)


def is_file_name(text: str) -> bool:
    try:
        return bool(text) and b"\0" not in fsencode(text)
    except UnicodeEncodeError:  # half of a surrogate pair
        return False


def read_new_messages(x: str | Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> tuple[dict, ...]:
    """What is said: a text of the user's, or messages."""
    if isinstance(x, Mapping):
        return (dict(x),)
    if isinstance(x, (list, tuple)) and x and all(isinstance(m, Mapping) for m in x):
        return tuple(dict(m) for m in x)
    if isinstance(x, (list, tuple)) and not x:
        raise BadRequest("say something: the list of messages is empty")
    if not isinstance(x, str):
        raise BadRequest(f"say takes a text or messages, not {type(x).__name__}")
    if not x:
        raise BadRequest("say something: the text is empty")
    return ({"role": "user", "content": x},)


def is_tool_result(messages: Sequence[dict]) -> bool:
    return bool(messages) and messages[0].get("role") == "tool"


def read_turns(file: Path, extra: dict[str, Any], vocab: int, salt: str) -> list[Turn]:
    """The turns in a saved state, each checked."""
    turns = extra.get("turns")
    if not isinstance(turns, list) or not turns:
        raise BadSnapshot(f"{file} holds a state without a conversation; it was not used")
    return [replace(read_turn(file, t, vocab), salt=salt) for t in turns]


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
    summary = fields.get("summary", "")
    return Turn(tuple(fields["messages"]), tuple(fields["tokens"]), summary if isinstance(summary, str) else "")
