"""Tokenizer: text to token ids and back, and chat messages to prompts. Each file format has its own module."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import BadRequest, NoTokenizer
from .chat_template import ChatTemplate, select_template
from .detokenizer import Detokenizer
from .tokenizer_config import read_bytes, read_settings
from .vocabulary import Vocabulary


class Tokenizer:
    """A vocabulary with its chat templates."""

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary = vocabulary
        self._compiled: dict[str, ChatTemplate] = {}
        self.eos_ids: frozenset[int] = vocabulary.eos_ids
        self.bos_id: int | None = vocabulary.bos
        self.vocab_size: int = vocabulary.size
        self.has_template: bool = bool(vocabulary.templates)
        parts = json.dumps([vocabulary.digest, dict(vocabulary.names), dict(vocabulary.templates)], sort_keys=True)
        self.digest: str = hashlib.sha256(parts.encode("utf-8", "surrogatepass")).hexdigest()

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        return cls(read_folder(Path(folder)))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        from .gguf_vocab import read_metadata

        return cls(read_metadata(metadata))

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """`special`: add BOS and EOS where the tokenizer does."""
        if not isinstance(text, str):
            raise BadRequest(f"only a str can be tokenized, not {type(text).__name__}")
        lone = next((c for c in text if "\ud800" <= c <= "\udfff"), None) if not text.isascii() else None
        if lone is not None:
            raise BadRequest(f"the text holds a lone surrogate {lone!a}, which is no character; remove it")
        return self._vocabulary.encode(text, special)

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        stream = self.detokenizer(skip_special=skip_special)
        return "".join([*map(stream.push, tokens), stream.finish()])

    def detokenizer(self, *, skip_special: bool = True, prompt: Sequence[int] = ()) -> Detokenizer:
        """A stream of text; after a `prompt`, of what is added to its text."""
        vocab = self._vocabulary
        piece = (lambda t: None if t in vocab.special_ids else vocab.piece(t)) if skip_special else vocab.piece
        return Detokenizer(vocab.size, piece, vocab.stages(), prompt)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """Apply the chat template; special tokens are written out as text."""
        name = select_template(self._vocabulary.templates, tools)
        if name not in self._compiled:
            self._compiled[name] = ChatTemplate(self._vocabulary.templates[name], self._vocabulary.names)
        return self._compiled[name].render(messages, tools, enable_thinking, add_generation_prompt)

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Apply the chat template and encode; the template writes its own BOS."""
        return self.encode(self.render(messages, **options), special=False)


def read_folder(folder: Path) -> Vocabulary:
    """tokenizer.json when there is one, else SentencePiece's tokenizer.model."""
    if (folder / "tokenizer.json").is_file():
        from .tokenizer_json import read_json

        return read_json(read_bytes(folder / "tokenizer.json"), read_settings(folder))
    if (folder / "tokenizer.model").is_file():
        from .spm import read_model

        return read_model(read_bytes(folder / "tokenizer.model"), read_settings(folder))
    raise NoTokenizer(f"{folder} holds neither tokenizer.json nor tokenizer.model; copy one there, or give token ids")
