"""A conversation for asyncio: the same turns, answers that are awaited."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from .async_stream import AsyncStream
from .output import complete
from .request import Completion, Event
from .session import Hearing, Question, Session

Ask = Callable[[Question, dict[str, Any]], AsyncStream]


class AsyncReply(AsyncIterator[Event]):
    """An answer that is being given. The session moves on when it is complete."""

    def __init__(self, hearing: Hearing, stream: AsyncStream):
        self._hearing, self._stream = hearing, stream

    async def __anext__(self) -> Event:
        return self._hearing.hear(await anext(self._stream))

    async def completion(self) -> Completion:
        """The whole answer."""
        async for _ in self:
            continue
        return complete(self._hearing.events)

    async def text(self) -> str:
        return (await self.completion()).text

    async def aclose(self) -> None:
        await self._stream.aclose()


class AsyncSession:
    def __init__(self, session: Session, ask: Ask):
        self.session, self._ask = session, ask

    async def say(self, text: str, **options: Any) -> AsyncReply:
        """Ask; iterate the reply for its events, or await its `text()`."""
        question, given = await asyncio.to_thread(self.session.question, text, options)
        return AsyncReply(Hearing(self.session, question), self._ask(question, given))

    def fork(self) -> "AsyncSession":
        return AsyncSession(self.session.fork(), self._ask)

    def rewind(self, turns: int = 1) -> None:
        self.session.rewind(turns)

    async def save(self, path: str | Path, name: str | None = None) -> None:
        await asyncio.to_thread(self.session.save, path, name)
