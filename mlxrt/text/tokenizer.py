"""Tokenizer: text to token ids and back, and chat messages to prompts. Each file format has its own module."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import BadRequest, NoTokenizer
from .chat_format import ChatFormat
from .detokenizer import Detokenizer
from .parsing.lexer import LexerVocabulary
from .thinking import merge_thinking
from .tokenizer_config import read_bytes, read_settings
from .vocabulary import Vocabulary


class Tokenizer:
    """A vocabulary with its chat templates."""

    def __init__(self, vocabulary: Vocabulary):
        self.vocabulary = vocabulary
        self.chat_format = ChatFormat(vocabulary)
        self._stages = vocabulary.stages()
        self.eos_ids: frozenset[int] = vocabulary.eos_ids
        self.bos_id: int | None = vocabulary.bos
        self.vocab_size: int = vocabulary.size
        parts = json.dumps([vocabulary.digest, dict(vocabulary.names), dict(vocabulary.templates)], sort_keys=True)
        self.digest: str = hashlib.sha256(parts.encode("utf-8", "surrogatepass")).hexdigest()

    def __repr__(self) -> str:
        template = "with a chat template" if self.has_template else "no chat template"
        return f"<Tokenizer: {self.vocab_size} tokens, {template}>"

    @property
    def has_template(self) -> bool:
        """Whether messages can be given: there is a chat template, the files' own or a built-in one."""
        return bool(self.chat_format.templates)

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        return cls(read_folder(Path(folder)))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        from .gguf_vocab import read_metadata

        return cls(read_metadata(metadata))

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """`special`: add BOS and EOS where the tokenizer does."""
        check_text(text)
        return self.vocabulary.encode(text, special)

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        stream = self.detokenizer(skip_special=skip_special)
        return "".join([*map(stream.push, tokens), stream.finish()])

    @property
    def special_ids(self) -> frozenset[int]:
        return self.vocabulary.special_ids

    def token_bytes(self, token: int) -> bytes:
        """What a token adds to the middle of a text; nothing for an id without a token."""
        piece: str | bytes | None = self.vocabulary.piece(token)
        for stage in self._stages:
            if isinstance(piece, str):
                piece = stage.convert(piece)
        return piece.encode() if isinstance(piece, str) else piece or b""

    @cached_property
    def blank_ids(self) -> tuple[int, ...]:
        """The tokens that are one or two new lines."""
        return tuple(t for t in range(self.vocab_size) if self.token_bytes(t) in (b"\n", b"\n\n"))

    def detokenizer(self, *, skip_special: bool = True, prompt: Sequence[int] = ()) -> Detokenizer:
        """A stream of text; after a `prompt`, of what is added to its text."""
        vocab = self.vocabulary
        piece = (lambda t: None if t in vocab.special_ids else vocab.piece(t)) if skip_special else vocab.piece
        return Detokenizer(vocab.size, piece, vocab.stages(), prompt)

    @cached_property
    def lexer_vocabulary(self) -> LexerVocabulary:
        """What the parsers of outputs read tokens with."""
        vocab = self.vocabulary
        return LexerVocabulary(
            vocab.size,
            vocab.added,
            vocab.special_ids,
            lambda prompt: self.detokenizer(skip_special=False, prompt=prompt),
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        thinking: str = "auto",
        enable_thinking: bool | None = None,
        template_options: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """Apply the chat template; special tokens are written out as text."""
        thinking = merge_thinking(thinking, enable_thinking)
        prompt = self.chat_format.render(messages, tools, thinking, template_options, add_generation_prompt)
        return self.chat_format.guard.remove_guards(prompt.text) if prompt.guarded else prompt.text

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        thinking: str = "auto",
        enable_thinking: bool | None = None,
        template_options: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Apply the chat template and encode; the template writes its own BOS.

        Only special tokens that the template writes become tokens: in the messages they are text.
        """
        thinking = merge_thinking(thinking, enable_thinking)
        prompt = self.chat_format.render(messages, tools, thinking, template_options, add_generation_prompt)
        if not prompt.guarded:
            return self.encode(prompt.text, special=False)
        check_text(prompt.text)
        return self.chat_format.encode_guarded(prompt.text)


def check_text(text: str) -> None:
    if not isinstance(text, str):
        raise BadRequest(f"only a str can be tokenized, not {type(text).__name__}")
    lone = next((c for c in text if "\ud800" <= c <= "\udfff"), None) if not text.isascii() else None
    if lone is not None:
        raise BadRequest(f"the text holds a lone surrogate {lone!a}, which is no character; remove it")


def read_folder(folder: Path) -> Vocabulary:
    """tokenizer.json when there is one, else SentencePiece's tokenizer.model."""
    if (folder / "tokenizer.json").is_file():
        from .tokenizer_json import read_json

        return read_json(read_bytes(folder / "tokenizer.json"), read_settings(folder))
    if (folder / "tokenizer.model").is_file():
        from .spm import read_model

        return read_model(read_bytes(folder / "tokenizer.model"), read_settings(folder))
    raise NoTokenizer(f"{folder} holds neither tokenizer.json nor tokenizer.model; copy one there, or give token ids")
