"""The tokenizer of a checkpoint folder: tokenizer.json when there is one, else SentencePiece's tokenizer.model."""

from pathlib import Path

from ..errors import NoTokenizer
from .settings import read_bytes, read_settings
from .vocabulary import Vocabulary


def read_folder(folder: Path) -> Vocabulary:
    if (folder / "tokenizer.json").is_file():
        from .tokenizer_json import read_json

        return read_json(read_bytes(folder / "tokenizer.json"), read_settings(folder))
    if (folder / "tokenizer.model").is_file():
        from .sentencepiece_model import read_model

        return read_model(read_bytes(folder / "tokenizer.model"), read_settings(folder))
    raise NoTokenizer(f"{folder} holds neither tokenizer.json nor tokenizer.model; copy one there, or give token ids")
