"""WeightFormat: how a matrix is stored when it is not plain floats, and what every such format can do."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import mlx.core as mx
import mlx.nn as nn

Arrays = Mapping[str, mx.array]


class WeightFormat(ABC):
    """The format of one matrix, or of one stack of experts. `str()` describes it in a few words."""

    @property
    @abstractmethod
    def parts(self) -> tuple[str, ...]:
        """The tensors of the matrix, by their names below the module's path."""

    @abstractmethod
    def build_module(self, plain: nn.Module, dtype: mx.Dtype) -> nn.Module:
        """The module that computes the same as `plain` from the stored form."""

    @abstractmethod
    def module_tensors(self, path: str, arrays: Arrays) -> dict[str, mx.array]:
        """That module's parameters but the bias, which keeps its name."""

    @abstractmethod
    def dequantize(self, path: str, arrays: Arrays) -> mx.array:
        """The matrix, float32."""


def dtype_name(array: mx.array) -> str:
    return str(array.dtype).removeprefix("mlx.core.")


def describe(array: mx.array | None) -> str:
    """dtype and shape, for messages."""
    return "nothing" if array is None else f"{dtype_name(array)} {list(array.shape)}"
