"""Prompts: sections of a real text, or random tokens where the model has no tokenizer.

The text is the beginning of Moby-Dick (Melville, 1851, public domain), shipped with the package.
"""

import gzip
import random
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from ..errors import BadRequest
from .backend import Backend

MAX_CHARACTERS = 400_000  # of a text that are tokenized
RANDOM_TOKENS = 1 << 16


def read_corpus() -> str:
    return gzip.decompress((files(__package__) / "corpus.txt.gz").read_bytes()).decode("utf-8")


@dataclass(frozen=True)
class Prompts:
    """Prompts by length and section. Two sections differ from their first token on, where the text allows."""

    tokens: tuple[int, ...]
    source: str
    real_text: bool  # not random tokens

    def __call__(self, count: int, section: int) -> list[int]:
        size = len(self.tokens)
        start = section * 997 % max(1, size - 997) if size > 997 else 0
        found = list(self.tokens[start : start + count])
        while len(found) < count:  # a text that is too short is repeated
            found += self.tokens[: count - len(found)]
        return found


def make_prompts(ours: Backend, path: Path | None) -> Prompts:
    if not ours.info["tokenizer"]:
        if path is not None:
            raise BadRequest(f"--text {path}: this model has no tokenizer to read it with; leave it out")
        return random_prompts(ours.info["vocab"], "random tokens: the model has no tokenizer")
    text, source = (read_corpus(), "Moby-Dick") if path is None else (read_text(path), str(path))
    return Prompts(tuple(ours.ask(do="encode", text=text)), source, True)


def read_text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")[:MAX_CHARACTERS]
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"--text {path} cannot be read: {error}") from None
    if not text.strip():
        raise BadRequest(f"--text {path} is empty")
    return text


def random_prompts(vocab: int, source: str) -> Prompts:
    generator = random.Random(0)
    return Prompts(
        tuple(generator.randrange(10, max(11, vocab - 10)) % vocab for _ in range(RANDOM_TOKENS)), source, False
    )
