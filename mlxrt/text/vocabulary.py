"""What every source of a tokenizer boils down to. Plain data and three functions; knows no file format."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .decoding import Stage


@dataclass(frozen=True)
class Vocabulary:
    size: int
    encode: Callable[[str, bool], list[int]]  # text, whether to add what the tokenizer puts around a text
    piece: Callable[[int], Any]  # None for an id that stands for nothing
    hidden: frozenset[int]  # ids that skip_special leaves out
    stages: Callable[[], list[Stage]]  # a fresh chain that makes text of pieces
    bos: int | None
    ends: frozenset[int]
    names: Mapping[str, str] = field(default_factory=dict)  # bos_token, eos_token ... as chat templates call them
    templates: Mapping[str, str] = field(default_factory=dict)  # by name: default, tool_use ...
    digest: str = ""  # of everything above, out of the bytes it was made from
