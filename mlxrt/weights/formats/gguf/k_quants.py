"""K-quant blocks that stay as the file has them: a matrix is rows of bytes, which the CPU kernels read."""

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from ....errors import BadCheckpoint
from ....kernels import QuantizedMatrix
from ....kernels.ops.quantized import K_QUANTS
from ....models.quantized.packed_linear import PackedEmbedding, PackedLinear
from ..weight_format import WeightFormat, describe

K_QUANT_SUFFIXES = tuple(f".{kind}" for kind in K_QUANTS)  # of the tensor that holds the blocks


@dataclass(frozen=True)
class KQuantFormat(WeightFormat):
    kind: str  # q4_k ...

    def __str__(self) -> str:
        return f"GGUF {self.kind.upper()}"

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.kind,)

    def build_module(self, plain: nn.Module, dtype: mx.Dtype) -> nn.Module:
        rows, width = plain["weight"].shape
        matrix = QuantizedMatrix(mx.zeros((rows, width // 256 * K_QUANTS[self.kind]), mx.uint8), mode=self.kind)
        if isinstance(plain, nn.Embedding):
            return PackedEmbedding(matrix)
        return PackedLinear(matrix, plain.get("bias"))

    def module_tensors(self, path: str, arrays: Mapping[str, mx.array]) -> dict[str, mx.array]:
        return {"weight": arrays[f"{path}.{self.kind}"]}

    def dequantize(self, path: str, arrays: Mapping[str, mx.array]) -> mx.array:
        return QuantizedMatrix(arrays[f"{path}.{self.kind}"], mode=self.kind).plain()


def read_k_quant(path: str, kind: str, shape: tuple[int, ...], arrays: Mapping[str, mx.array]) -> KQuantFormat:
    """The format of the module at `path`, whose matrix is `shape`."""
    blocks = arrays[f"{path}.{kind}"]
    expected = [shape[0], shape[1] // 256 * K_QUANTS[kind]] if len(shape) == 2 and shape[1] % 256 == 0 else None
    if list(blocks.shape) != expected or blocks.dtype != mx.uint8:
        raise BadCheckpoint(f"{path}: {describe(blocks)} of {kind.upper()} do not fit a matrix {list(shape)}")
    return KQuantFormat(kind)
