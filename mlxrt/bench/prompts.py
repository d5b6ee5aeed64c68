"""What the engines are asked: stretches of a real text, or of drawn tokens where there is no text or no tokenizer."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..errors import BadRequest, HubError
from . import novel
from .side import Side

CHARACTERS = 400_000  # of the text that are tokenized at most


@dataclass(frozen=True)
class Prompts:
    """Tokens by how many and which stretch. Two stretches differ from their first token on, where the text allows."""

    tokens: tuple[int, ...]
    source: str
    language: bool  # words of a language, not drawn numbers

    def __call__(self, count: int, stretch: int) -> list[int]:
        size = len(self.tokens)
        start = stretch * 997 % max(1, size - 997) if size > 997 else 0
        found = list(self.tokens[start : start + count])
        while len(found) < count:  # a text that is too short is read again
            found += self.tokens[: count - len(found)]
        return found


def find_prompts(ours: Side, text: Path | None, say: Callable[[str], None]) -> Prompts:
    if not ours.told["tokenizer"]:
        if text is not None:
            raise BadRequest(f"--text {text}: this model has no tokenizer to read it with; leave it out")
        return drawn(ours.told["vocab"], "drawn tokens: the model has no tokenizer")
    if text is not None:
        return Prompts(tuple(ours.ask(do="encode", text=read(text))), str(text), True)
    try:
        words = novel.read_text()[:CHARACTERS]
    except HubError as error:
        say(f"{error}; prompts are drawn tokens, --text FILE gives words")
        return drawn(ours.told["vocab"], f"drawn tokens: {error}")
    return Prompts(tuple(ours.ask(do="encode", text=words)), f"Moby-Dick ({novel.PACKAGE})", True)


def read(path: Path) -> str:
    try:
        words = path.read_text(encoding="utf-8")[:CHARACTERS]
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"--text {path} cannot be read: {error}") from None
    if not words.strip():
        raise BadRequest(f"--text {path} is empty")
    return words


def drawn(vocab: int, source: str, count: int = 1 << 16) -> Prompts:
    chance = random.Random(0)
    return Prompts(tuple(chance.randrange(10, max(11, vocab - 10)) % vocab for _ in range(count)), source, False)
