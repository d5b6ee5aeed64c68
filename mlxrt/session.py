"""A conversation: say, fork, rewind, save, restore.

A session keeps the tokens that were really fed and produced, with the text they stand for. A new turn's template
text is matched against that text, so only what is new is tokenised and nothing that was said is tokenised twice
differently. What the engine's store still holds of the tokens is not computed again.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import BadRequest, BadSnapshot
from .request import Completion, Event, Finish, Request
from .snapshot import load_state, save_state
from .ticket import complete

if TYPE_CHECKING:
    from .engine import Engine


@dataclass(frozen=True)
class Turn:
    """Where the conversation stands after an answer: messages, what was fed, and its tokens."""

    messages: tuple[dict, ...] = ()
    text: str = ""
    tokens: tuple[int, ...] = ()


class Reply(Iterator[Event]):
    """An answer that is being given. The session moves on when it is complete; closing it early leaves it as it was."""

    def __init__(self, session: "Session", request: Request, messages: tuple[dict, ...], text: str):
        self._session, self._messages, self._text = session, messages, text
        self._base, self._prompt = session.turns[-1], request.tokens or ()
        self._stream = session.engine.stream(request)
        self._events: list[Event] = []

    def __next__(self) -> Event:
        event = next(self._stream)
        self._events.append(event)
        if event.error:
            raise event.error
        if event.finish_reason in (Finish.STOP, Finish.LENGTH):
            self._session._accept(self._base, self._turn())
        return event

    def _turn(self) -> Turn:
        done = complete(self._events)
        tokenizer = self._session.engine.tokenizer
        tokens = self._prompt + done.tokens
        text = self._text + tokenizer.decode(list(done.tokens), skip_special=False)
        return Turn((*self._messages, {"role": "assistant", "content": done.text}), text, tokens)

    @property
    def completion(self) -> Completion:
        """The whole answer; waits for it."""
        for _ in self:
            continue
        return complete(self._events)

    @property
    def text(self) -> str:
        return self.completion.text

    def close(self) -> None:
        self._stream.close()


class Session:
    def __init__(self, engine: "Engine", system: str | None = None, options: dict[str, Any] | None = None):
        self.engine, self.options = engine, dict(options or {})
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
        if not isinstance(text, str) or not text:
            raise BadRequest("say something: the text is empty")
        given = self.options | options
        extra = {k: given.pop(k) for k in ("tools", "enable_thinking") if k in given}
        messages = (*self.messages, {"role": "user", "content": text})
        rendered = self.engine.tokenizer.render(list(messages), **extra)
        tokens = self._tokenise(rendered)
        return Reply(self, Request.of(list(tokens), **given), messages, rendered)

    def _tokenise(self, rendered: str) -> tuple[int, ...]:
        last, tokenizer = self.turns[-1], self.engine.tokenizer
        if last.tokens and rendered.startswith(last.text):
            return last.tokens + tuple(tokenizer.encode(rendered[len(last.text) :], special=False))
        return tuple(tokenizer.encode(rendered, special=False))

    def _accept(self, base: Turn, turn: Turn) -> None:
        if self.turns[-1] is not base:
            raise BadRequest("the session moved on while this answer was being given; fork it to answer in parallel")
        self.turns.append(turn)

    def fork(self) -> "Session":
        """A session that goes its own way from here. Nothing is copied: both find the same blocks."""
        other = Session(self.engine, None, self.options)
        other.turns = list(self.turns)
        return other

    def rewind(self, turns: int = 1) -> None:
        """Forget the last questions and answers."""
        if not isinstance(turns, int) or not 0 <= turns < len(self.turns):
            raise BadRequest(f"cannot rewind {turns!r} turns: the session has {len(self.turns) - 1}")
        del self.turns[len(self.turns) - turns :]

    def save(self, path: str | Path) -> None:
        """The conversation and its computed state as one file, written whole or not at all."""
        path, engine = Path(path), self.engine
        if not path.parent.is_dir():
            raise BadRequest(f"{path.parent} is no folder to save into")
        state = engine.state(self.tokens)
        if state is None:
            raise BadSnapshot("there is nothing to save: no turn is complete, or the prefix cache is off")
        extra = {"turns": [asdict(t) for t in self.turns]}
        save_state(path, engine.runner, state, engine.identity(), extra)

    @classmethod
    def restore(cls, engine: "Engine", path: str | Path, **options) -> "Session":
        state, extra = load_state(Path(path), engine.runner, engine.empty(), engine.identity())
        if engine.store is None:
            raise BadRequest("the engine runs without a prefix cache: a state cannot be restored into it")
        engine.store.put(state)
        session = cls(engine, None, options)
        session.turns = [
            replace(Turn(), messages=tuple(t["messages"]), text=t["text"], tokens=tuple(t["tokens"])) for t in extra["turns"]
        ]
        return session
