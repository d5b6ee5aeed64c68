"""Vocabulary, the common result of every tokenizer file format, and what the readers of those formats share."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import BadTokenizer, MlxrtError
from .detokenizer import Stage


@dataclass(frozen=True)
class Vocabulary:
    size: int
    encode: Callable[[str, bool], list[int]]  # text, whether to add BOS and EOS
    piece: Callable[[int], Any]  # None for an id without a token
    special_ids: frozenset[int]  # left out by skip_special
    stages: Callable[[], list[Stage]]  # a new chain for one detokenizer
    bos: int | None
    eos_ids: frozenset[int]
    names: Mapping[str, str] = field(default_factory=dict)  # bos_token, eos_token ... for chat templates
    templates: Mapping[str, str] = field(default_factory=dict)  # by name: default, tool_use ...
    digest: str = ""  # of all of the above
    added: Mapping[str, int] = field(default_factory=dict)  # tokens that are matched before anything else
    # An encoder without BOS and EOS that knows these tokens only as written here: {"<s>": "(guard)<s>"}.
    rename: Callable[[Mapping[str, str]], Callable[[str], list[int]]] | None = None


@dataclass(frozen=True)
class SpecialToken:
    """A token that is matched in a text before anything else."""

    text: str
    id: int
    lstrip: bool = False  # swallows the white space before it
    rstrip: bool = False  # and after it


class SpecialTokenSplitter:
    """Splits a text at its special tokens: leftmost first, of those that start at one position the longest."""

    def __init__(self, tokens: Iterable[SpecialToken]):
        tokens = sorted((t for t in tokens if t.text), key=lambda t: len(t.text), reverse=True)
        # One that swallows white space before it begins there: only a regular expression finds that.
        self._find = find_by_pattern(tokens) if any(t.lstrip for t in tokens) else find_by_lookup(tokens)

    def split(self, text: str) -> Iterator[str | int]:
        """Strings and ids in order; no empty strings."""
        at = 0
        for start, end, token in self._find(text):
            if start > at:
                yield text[at:start]
            yield token
            at = end
        if at < len(text):
            yield text[at:]


Finder = Callable[[str], Iterator[tuple[int, int, int]]]  # where each token starts and ends, and its id


def find_by_pattern(tokens: Sequence[SpecialToken]) -> Finder:
    pattern, ids = re.compile("|".join(map(token_pattern, tokens)) or "(?!)"), [t.id for t in tokens]

    def find(text: str) -> Iterator[tuple[int, int, int]]:
        for match in pattern.finditer(text):
            yield match.start(), match.end(), ids[(match.lastindex or 0) - 1]  # every alternative is one group

    return find


def find_by_lookup(tokens: Sequence[SpecialToken]) -> Finder:
    """By the first character, then by length: Gemma has 6,400 such tokens, too many to try at every position."""
    by_text = {t.text: t for t in tokens}
    lengths: dict[str, list[int]] = {}
    for length, first in sorted({(len(t.text), t.text[0]) for t in tokens}, reverse=True):
        lengths.setdefault(first, []).append(length)
    start = re.compile(f"[{re.escape(''.join(sorted(lengths)))}]" if lengths else "(?!)")
    space = re.compile(r"\s*")

    def find(text: str) -> Iterator[tuple[int, int, int]]:
        at = 0
        while match := start.search(text, at):
            at = match.start()
            found = (by_text.get(text[at : at + length]) for length in lengths[text[at]])
            token = next((t for t in found if t is not None), None)
            if token is None:
                at += 1
                continue
            end = at + len(token.text)
            end = space.match(text, end).end() if token.rstrip else end  # type: ignore[union-attr]  # matches anything
            yield at, end, token.id
            at = end

    return find


def token_pattern(token: SpecialToken) -> str:
    before, after = (r"\s*" if strips else "" for strips in (token.lstrip, token.rstrip))
    return f"{before}({re.escape(token.text)}){after}"


def is_encodable(text: str) -> bool:
    """Whether a text is valid Unicode: JSON and GGUF can hold lone surrogates."""
    return text.isascii() or not any("\ud800" <= c <= "\udfff" for c in text)


def rust_call(what: str, call: Callable[[], Any]) -> Any:
    """Call into the tokenizers library; its exceptions and panics become a BadTokenizer that names `what`."""
    try:
        return call()
    except MlxrtError:
        raise
    except Exception as e:  # the library raises Exception itself for bad data, so nothing narrower exists
        raise BadTokenizer(f"{what} cannot be used: {first_line(e)}") from None
    except BaseException as e:
        if type(e).__name__ != "PanicException":  # not exported anywhere; it derives from BaseException
            raise
        raise BadTokenizer(f"{what} cannot be used: the tokenizers library panicked: {first_line(e)}") from None


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
