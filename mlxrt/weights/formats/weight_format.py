"""How a matrix is kept when it is not plain numbers: what every such layout can do.

Refuses to know any layout: quantised.py has MLX's, jangtq.py, jangh.py, codebook.py and turning.py the others.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import mlx.core as mx
import mlx.nn as nn

Arrays = Mapping[str, mx.array]


class Stored(ABC):
    """One matrix, or one stack of experts, of a checkpoint. `str()` of it says what it is in a few words."""

    @property
    @abstractmethod
    def parts(self) -> tuple[str, ...]:
        """The tensors the matrix is made of, as they are called behind the module's path."""

    @abstractmethod
    def module(self, plain: nn.Module, dtype: mx.Dtype) -> nn.Module:
        """What computes the same as `plain` from the stored form."""

    @abstractmethod
    def tensors(self, path: str, arrays: Arrays) -> dict[str, mx.array]:
        """What that module takes, by the names of its parameters; a bias beside the matrix keeps its own."""

    @abstractmethod
    def matrix(self, path: str, arrays: Arrays) -> mx.array:
        """The numbers themselves, float32."""
