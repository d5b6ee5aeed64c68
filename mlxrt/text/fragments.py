"""Special tokens written out in a text: cuts them from the text between. Knows no algorithm that encodes the text."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Mark:
    """A token that is taken out of a text as a whole."""

    text: str
    id: int
    lstrip: bool = False  # swallows the white space before it
    rstrip: bool = False  # and after it


class Fragments:
    """Of the tokens that start at one place the longest counts; the leftmost place first."""

    def __init__(self, marks: Iterable[Mark]):
        marks = sorted((m for m in marks if m.text), key=lambda m: len(m.text), reverse=True)
        self.ids = [m.id for m in marks]
        self.any = re.compile("|".join(spelled(m) for m in marks) or "(?!)")

    def cut(self, text: str) -> Iterator[str | int]:
        """Texts and ids in order; no empty texts."""
        at = 0
        for found in self.any.finditer(text):
            if found.start() > at:
                yield text[at : found.start()]
            yield self.ids[(found.lastindex or 0) - 1]  # every alternative is one group
            at = found.end()
        if at < len(text):
            yield text[at:]


def spelled(mark: Mark) -> str:
    before, after = (r"\s*" if strips else "" for strips in (mark.lstrip, mark.rstrip))
    return f"{before}({re.escape(mark.text)}){after}"
