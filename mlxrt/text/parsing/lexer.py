"""The lexer: token ids in, text and markers out.

Where the vocabulary has a marker as one token, only that token is the marker: the same characters written with other
tokens are text. Other markers are found in the text, however it is cut into tokens. Special tokens that are no markers
are never shown; they stay in the raw text.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..detokenizer import Detokenizer
from ..stop_strings import partial_match


@dataclass(frozen=True)
class Item:
    """A piece of text, or a marker."""

    raw: str
    text: str = ""  # to show, were it no marker: empty for special tokens
    marker: str = ""


@dataclass(frozen=True)
class LexerVocabulary:
    """What a lexer needs of a tokenizer."""

    size: int
    added: Mapping[str, int]  # tokens that are matched before anything else
    special: Collection[int]  # those of them that are not shown
    detokenizer: Callable[[Sequence[int]], Detokenizer]  # after a prompt; writes special tokens out
    names: Mapping[int, str] = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "names", {i: text for text, i in self.added.items()})


class Lexer:
    def __init__(self, vocabulary: LexerVocabulary, markers: Iterable[str], prompt: Sequence[int] = ()):
        self._vocabulary = vocabulary
        self._detokenizer = vocabulary.detokenizer(prompt)
        self._markers = frozenset(markers)
        self._matcher = MarkerMatcher(m for m in self._markers if m not in vocabulary.added)

    def push(self, token: int, hidden: bool = False) -> list[Item]:
        """What is certain with this token. A `hidden` one is not shown: it ended the answer."""
        vocabulary = self._vocabulary
        if not 0 <= token < vocabulary.size:  # a row that pads the embedding
            return []
        name = vocabulary.names.get(token)
        text = self._detokenizer.push(token)
        if name is None and not hidden:
            return self._matcher.push(text)
        own = name if name is not None and text.endswith(name) else None
        if own is None:  # a decoder that holds tokens back, or changes them
            text += self._detokenizer.finish()
            self._detokenizer = self._vocabulary.detokenizer([token])
            own = text if name is None or not text.endswith(name) else name
        before = text[: len(text) - len(own)]
        items = [*self._matcher.push(before), *self._matcher.finish()]
        if name in self._markers:
            return [*items, Item(own, "" if token in vocabulary.special else own, name)]
        return [*items, Item(own, "" if hidden or token in vocabulary.special else own)]

    def finish(self) -> list[Item]:
        """What was held back, when no token follows."""
        return [*self._matcher.push(self._detokenizer.finish()), *self._matcher.finish()]


class MarkerMatcher:
    """Finds markers in text, the longest of those that start first; holds back what may become one."""

    def __init__(self, markers: Iterable[str]):
        self._markers = sorted(markers, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._markers)) or "(?!)")
        self._held = ""

    def push(self, text: str) -> list[Item]:
        if not self._markers:
            return [Item(text, text)] if text else []
        if not text:
            return []
        text, items = self._held + text, []
        while True:
            cut = len(text) - max(partial_match(text, marker) for marker in self._markers)
            found = self._pattern.search(text)
            if found is None or found.start() >= cut:  # a longer one may start there or before
                break
            items += self._split(text, found)
            text = text[found.end() :]
        self._held = text[cut:]
        if cut:
            items.append(Item(text[:cut], text[:cut]))
        return items

    def finish(self) -> list[Item]:
        text, items = self._held, []
        self._held = ""
        while found := self._pattern.search(text):
            items += self._split(text, found)
            text = text[found.end() :]
        return [*items, Item(text, text)] if text else items

    def _split(self, text: str, found: re.Match[str]) -> list[Item]:
        before = text[: found.start()]
        return [*([Item(before, before)] if before else []), Item(found[0], found[0], found[0])]
