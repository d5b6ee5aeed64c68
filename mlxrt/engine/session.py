"""A conversation: say, fork, rewind, save, restore.

A session keeps the tokens that were really fed and produced. Where the chat template leaves the history as it was,
only what is new is tokenised, so an answer is never tokenised a second time and differently; where it rewrites the
history (drops earlier reasoning), the template's text counts. What the engine's store holds is not computed again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..cache.storage.archive import Archive, is_archive
from ..cache.storage.snapshot import load_state, save_state
from ..errors import BadRequest, BadSnapshot
from .output import complete
from .request import Completion, Event, Finish, Request

if TYPE_CHECKING:
    from .engine import Engine

OVERFLOW = ("error", "drop-oldest")
ANSWER = "\ufdd0answer\ufdd1"  # stands for the last answer in a template's output; no text holds these two


@dataclass(frozen=True)
class Turn:
    """Where the conversation stands after an answer."""

    messages: tuple[dict, ...] = ()
    prompt: str = ""  # the template's text that was answered
    tokens: tuple[int, ...] = ()  # all that was fed and produced
    end: str = ""  # the text of the token that ended the answer, if one did


@dataclass(frozen=True)
class Question:
    """What is asked, and the turns `before` it; those that were dropped to make it fit are not among them."""

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


class Hearing:
    """An answer as it is heard, and what the session makes of it when it is complete."""

    def __init__(self, session: "Session", question: Question):
        self._session, self._question, self._base = session, question, session.turns[-1]
        self.events: list[Event] = []

    @property
    def dropped_turns(self) -> int:
        return self._question.dropped

    def hear(self, event: Event) -> Event:
        if not self.events and self._question.dropped:
            event = replace(event, note=self._question.note)
        self.events.append(event)
        if event.error:
            raise event.error
        if event.finish_reason in (Finish.STOP, Finish.LENGTH):
            self._session._accept(self._base, [*self._question.before, self._turn()])
        return event

    def _turn(self) -> Turn:
        done = complete(self.events)
        engine = self._session.engine
        ended = done.tokens[-1:] if done.tokens[-1] in engine.source.eos else ()
        end = engine.tokenizer.decode(list(ended), skip_special=False)
        asked = self._question
        messages = (*asked.messages, {"role": "assistant", "content": done.text})
        return Turn(messages, asked.text, asked.tokens + done.tokens, end)


class Reply(Hearing, Iterator[Event]):
    """An answer that is being given. The session moves on when it is complete; closing it early leaves it as it was."""

    def __init__(self, session: "Session", question: Question, options: dict[str, Any]):
        super().__init__(session, question)
        self._stream = session.engine.stream(Request.of(list(question.tokens), **options))

    def __next__(self) -> Event:
        return self.hear(next(self._stream))

    @property
    def completion(self) -> Completion:
        """The whole answer; waits for it."""
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
        self,
        engine: "Engine",
        system: str | None = None,
        options: dict[str, Any] | None = None,
        on_overflow: str = "error",
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
        return Reply(self, *self.question(text, options))

    def question(self, text: str, options: dict[str, Any]) -> tuple[Question, dict[str, Any]]:
        """What a text asks after all that was said, and the options of the request that will answer it."""
        if not isinstance(text, str) or not text:
            raise BadRequest("say something: the text is empty")
        given = self.options | options
        extra: dict[str, Any] = {k: given.pop(k) for k in ("tools", "enable_thinking") if k in given}
        question = self._ask(self.turns, text, extra)
        if self.on_overflow == "drop-oldest":
            question = self._shorten(question, text, extra, Request.of("x", **given).params.max_tokens)
        return question, given

    def _ask(self, turns: Sequence[Turn], text: str, extra: dict[str, Any], dropped: int = 0) -> Question:
        messages = (*turns[-1].messages, {"role": "user", "content": text})
        rendered = self.engine.tokenizer.render(list(messages), **extra)
        tokens = self._continued(turns[-1], messages, rendered, extra)
        tokens = tokens or self.engine.tokenizer.encode(rendered, special=False)
        return Question(tuple(turns), messages, rendered, tuple(tokens), dropped)

    def _shorten(self, question: Question, text: str, extra: dict[str, Any], wanted: int) -> Question:
        """The question after as few dropped turns as leave room for the answer, for up to a quarter of the context."""
        room = min(wanted, self.engine.context // 4)
        while len(question.tokens) + room > self.engine.context and len(question.before) > 1:
            dropped = question.dropped + 1
            question = self._ask(drop_oldest(question.before), text, extra, dropped)
        return question

    def _continued(
        self, last: Turn, messages: tuple[dict, ...], rendered: str, extra: dict[str, Any]
    ) -> list[int] | None:
        """The tokens so far and those of what the template puts after them, if it changes nothing before."""
        tokenizer = self.engine.tokenizer
        if not last.tokens:
            return None
        *before, answer, question = messages
        marked = tokenizer.render([*before, answer | {"content": ANSWER}, question], **extra)
        said = answer["content"]
        if not marked.startswith(last.prompt + ANSWER):
            return None
        if rendered not in (marked.replace(ANSWER, said), marked.replace(ANSWER, said.strip())):
            return None
        rest = marked[len(last.prompt + ANSWER) :]
        return [*last.tokens, *tokenizer.encode(rest.removeprefix(last.end), special=False)]

    def _accept(self, base: Turn, turns: list[Turn]) -> None:
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
        """The conversation and its computed state, written whole or not at all.

        One file; or, given a folder or a name, one state of an archive."""
        path, engine = Path(path), self.engine
        if not path.parent.is_dir():
            raise BadRequest(f"{path.parent} is no folder to save into")
        archive = Archive(path) if is_archive(path, name) else None
        state = engine.whole_state(self.tokens)
        if state is None:
            raise BadSnapshot("there is nothing to save: no turn is complete, or the prefix cache is off")
        extra = {"turns": [asdict(t) for t in self.turns], "model": engine.source.name}

        def write(to: Path) -> str:
            with engine.exclusive():
                engine.runner.flush()
                return save_state(to, engine.pools, state, engine.identity(), extra)

        try:
            if archive is None:
                write(path)
            else:
                archive.save(name, write, len(self.tokens), engine.source.name)
        except OSError as error:
            raise BadRequest(f"{path} cannot be written: {error.strerror}; nothing was saved") from None

    @classmethod
    def restore(
        cls, engine: "Engine", path: str | Path, name: str | None = None, on_overflow: str = "error", **options
    ) -> "Session":
        """The session that was saved there; `name` picks one of an archive."""
        if engine.store is None:
            raise BadRequest("the engine runs without a prefix cache: a state cannot be restored into it")
        session = cls(engine, None, options, on_overflow)
        file, digest = Archive(Path(path)).find(name) if is_archive(Path(path), name) else (Path(path), None)
        with engine.exclusive():
            identity, evict = engine.identity(), engine.store.evict
            engine.runner.flush()
            state, extra = load_state(file, engine.pools, engine.empty(), identity, digest, evict)
            session.turns = read_turns(file, extra, engine)
            engine.store.insert(state)
        return session


def drop_oldest(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """The turns without the first question and answer. What stays is tokenised anew: it begins differently now."""
    first, oldest, *rest = turns
    gone = len(oldest.messages)
    return (first, *(Turn(first.messages + turn.messages[gone:]) for turn in rest))


def read_turns(file: Path, extra: dict[str, Any], engine: "Engine") -> list[Turn]:
    """The turns in a saved state, each checked."""
    turns = extra.get("turns")
    if not isinstance(turns, list) or not turns:
        raise BadSnapshot(f"{file} holds a state without a conversation; it was not used")
    return [read_turn(file, t, engine.model.config.vocab_size) for t in turns]


def read_turn(file: Path, told: Any, vocab: int) -> Turn:
    found = told if isinstance(told, dict) else {}
    messages, tokens = found.get("messages"), found.get("tokens")
    sound = (
        isinstance(messages, list)
        and all(isinstance(m, dict) for m in messages)
        and isinstance(tokens, list)
        and all(type(t) is int and 0 <= t < vocab for t in tokens)
        and isinstance(found.get("prompt"), str)
        and isinstance(found.get("end"), str)
    )
    if not sound:
        raise BadSnapshot(f"{file}: a turn of its conversation is not as mlxrt writes them; it was not used")
    return Turn(tuple(found["messages"]), found["prompt"], tuple(found["tokens"]), found["end"])
