"""What a model is built from, however it is stored: a config, named tensors, maybe a tokenizer.

Knows no file format and no architecture: folder.py and gguf.py supply the first, mlxrt.models the second.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

if TYPE_CHECKING:
    from ...text import Tokenizer


LARGEST_DIMENSION = 2**31 - 1  # MLX keeps a dimension in 32 bits and wraps silently beyond


@dataclass(frozen=True)
class TensorInfo:
    """A stored tensor as its file's header describes it."""

    shape: tuple[int, ...]
    dtype: str  # the format's own word: BF16, U32, Q4_1 ...
    nbytes: int


class Checkpoint(ABC):
    """Config and tensors under Hugging Face names. Opening one reads headers only."""

    name: str
    path: Path
    config: dict[str, Any]
    generation: dict[str, Any]

    @abstractmethod
    def sizes(self) -> dict[str, TensorInfo]:
        """Every tensor as stored, from the headers; nothing is loaded."""

    @abstractmethod
    def load(self) -> dict[str, mx.array]:
        """Every tensor; a quantised X.weight comes packed with X.scales and, when affine, X.biases."""

    def beside(self, name: str) -> dict[str, mx.array] | None:
        """The tensors of a file that lies beside the weights and is none of them; None where there is none."""
        return None

    @abstractmethod
    def tokenizer(self) -> "Tokenizer":
        """The tokenizer stored with the weights; NoTokenizer when there is none."""

    @abstractmethod
    def save_tokenizer(self, folder: Path) -> None:
        """The tokenizer's files into another folder, for a converter; a line where they cannot be had."""

    @abstractmethod
    def files(self) -> list[Path]:
        """Every file that defines the model, in a fixed order."""
