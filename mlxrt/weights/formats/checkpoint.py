"""Checkpoint: config, named tensors and perhaps a tokenizer, whatever the file format."""

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
    dtype: str  # the format's own name: BF16, U32, Q4_1 ...
    nbytes: int


class Checkpoint(ABC):
    """Config and tensors under Hugging Face names. Opening one reads headers only."""

    name: str
    path: Path
    config: dict[str, Any]
    generation: dict[str, Any]

    @abstractmethod
    def sizes(self) -> dict[str, TensorInfo]:
        """All tensors as the headers describe them; nothing is loaded."""

    @abstractmethod
    def load(self) -> dict[str, mx.array]:
        """All tensors; a quantised X.weight is packed and comes with X.scales and, when affine, X.biases."""

    def load_sidecar(self, name: str) -> dict[str, mx.array] | None:
        """The tensors of an extra file beside the weights; None where there is none."""
        return None

    @abstractmethod
    def tokenizer(self) -> "Tokenizer":
        """The tokenizer stored with the weights; NoTokenizer where there is none."""

    @abstractmethod
    def save_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer's files into another folder; an error where they would not encode alike."""

    @abstractmethod
    def files(self) -> list[Path]:
        """All files that define the model, in a fixed order."""
