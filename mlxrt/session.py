"""A conversation: say, fork, rewind, save, restore.

A session keeps the tokens that were really fed and produced. Where the chat template leaves the history as it was,
only what is new is tokenised, so an answer is never tokenised a second time and differently; where it rewrites the
history (drops earlier reasoning), the template's text counts. What the engine's store holds is not computed again.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import BadRequest, BadSnapshot
from .request import Completion, Event, Finish, Request
from .snapshot import load_state, save_state
from .ticket import complete

if TYPE_CHECKING:
    from .engine import Engine

ANSWER = "\ufdd0answer\ufdd1"  # stands for the last answer in a template's output; no text holds these two


@dataclass(frozen=True)
class Turn:
    """Where the conversation stands after an answer."""

    messages: tuple[dict, ...] = ()
    prompt: str = ""  # the template's text that was answered
    tokens: tuple[int, ...] = ()  # all that was fed and produced
    end: str = ""  # the text of the token that ended the answer, if one did


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
        engine = self._session.engine
        ended = done.tokens[-1:] if done.tokens[-1] in engine.source.eos else ()
        end = engine.tokenizer.decode(list(ended), skip_special=False)
        messages = (*self._messages, {"role": "assistant", "content": done.text})
        return Turn(messages, self._text, self._prompt + done.tokens, end)

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
        tokens = self._continued(messages, rendered, extra) or self.engine.tokenizer.encode(rendered, special=False)
        return Reply(self, Request.of(list(tokens), **given), messages, rendered)

    def _continued(self, messages: tuple[dict, ...], rendered: str, extra: dict[str, Any]) -> list[int] | None:
        """The tokens so far and those of what the template puts after them, if it changes nothing before."""
        last, tokenizer = self.turns[-1], self.engine.tokenizer
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
            Turn(tuple(t["messages"]), t["prompt"], tuple(t["tokens"]), t["end"]) for t in extra["turns"]
        ]
        return session
