"""Text to tokens and back, for every source of a vocabulary. Knows no file format: those live next door."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import BadRequest
from .detokenizer import Detokenizer
from .template import Template, pick
from .vocabulary import Vocabulary


class Tokenizer:
    """One vocabulary with its chat templates."""

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary = vocabulary
        self._compiled: dict[str, Template] = {}
        self.eos_ids: frozenset[int] = vocabulary.ends
        self.bos_id: int | None = vocabulary.bos
        self.vocab_size: int = vocabulary.size
        self.has_template: bool = bool(vocabulary.templates)
        told = json.dumps([vocabulary.digest, dict(vocabulary.names), dict(vocabulary.templates)], sort_keys=True)
        self.digest: str = hashlib.sha256(told.encode("utf-8", "surrogatepass")).hexdigest()

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        from .folder import read_folder

        return cls(read_folder(Path(folder)))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        from .gguf_vocab import read_metadata

        return cls(read_metadata(metadata))

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """`special`: also what the tokenizer itself puts around a text (BOS, EOS)."""
        if not isinstance(text, str):
            raise BadRequest(f"only text can be tokenized, not {type(text).__name__}")
        lone = next((c for c in text if "\ud800" <= c <= "\udfff"), None) if not text.isascii() else None
        if lone is not None:
            raise BadRequest(f"the text holds a lone surrogate {lone!a}, which is no character; remove it")
        return self._vocabulary.encode(text, special)

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        stream = self.detokenizer(skip_special=skip_special)
        return "".join([*map(stream.push, tokens), stream.finish()])

    def detokenizer(self, *, skip_special: bool = True) -> Detokenizer:
        words = self._vocabulary
        shown = (lambda t: None if t in words.hidden else words.piece(t)) if skip_special else words.piece
        return Detokenizer(words.size, shown, words.stages())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The text the chat template makes of the messages, special tokens spelled out."""
        name = pick(self._vocabulary.templates, tools)
        if name not in self._compiled:
            self._compiled[name] = Template(self._vocabulary.templates[name], self._vocabulary.names)
        return self._compiled[name].render(messages, tools, enable_thinking, add_generation_prompt)

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Render, then encode as is: the template has written its own BOS."""
        return self.encode(self.render(messages, **options), special=False)
