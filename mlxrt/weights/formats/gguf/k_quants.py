"""K-quants that stay packed: as the file has them for CPU kernels, split for GPU kernels (kernels/ops/k_quants.py)."""

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from ....errors import BadCheckpoint
from ....kernels import QuantizedMatrix
from ....kernels.ops.k_quants import K_QUANTS, SPLIT_KINDS, empty_split, split_parts
from ....kernels.ops.quantized import split_matrix
from ....models.moe import ExpertLinear
from ....models.quantized.packed_linear import PackedEmbedding, PackedExpertLinear, PackedLinear
from ..weight_format import WeightFormat, describe
from .reader import GGML_BLOCKS

K_QUANT_SUFFIXES = tuple(dict.fromkeys(f".{kind}" for kind in (*K_QUANTS, *SPLIT_KINDS)))  # of the tensor with values


@dataclass(frozen=True)
class KQuantFormat(WeightFormat):
    """Rows of bytes, as in the file."""

    kind: str  # q4_k ...

    def __str__(self) -> str:
        return f"GGUF {self.kind.upper()}"

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.kind,)

    def empty_matrix(self, shape: tuple[int, ...]) -> QuantizedMatrix:
        *outer, width = shape
        return QuantizedMatrix(mx.zeros((*outer, width * K_QUANTS[self.kind] // 256), mx.uint8), mode=self.kind)

    def build_module(self, plain: nn.Module, dtype: mx.Dtype) -> nn.Module:
        matrix = self.empty_matrix(plain["weight"].shape)
        if isinstance(plain, nn.Embedding):
            return PackedEmbedding(matrix, dtype)
        if isinstance(plain, ExpertLinear):
            return PackedExpertLinear(matrix, plain.get("bias"))
        return PackedLinear(matrix, plain.get("bias"))

    def module_tensors(self, path: str, arrays: Mapping[str, mx.array]) -> dict[str, mx.array]:
        return dict(zip(("weight", "scales", "biases"), (arrays[f"{path}.{part}"] for part in self.parts)))

    def dequantize(self, path: str, arrays: Mapping[str, mx.array]) -> mx.array:
        return QuantizedMatrix(arrays[f"{path}.{self.kind}"], mode=self.kind).plain()


@dataclass(frozen=True)
class SplitFormat(KQuantFormat):
    """Values, scales and float16s apart; also of a stack of experts."""

    @property
    def parts(self) -> tuple[str, ...]:
        return split_parts(self.kind)

    def empty_matrix(self, shape: tuple[int, ...]) -> QuantizedMatrix:
        return split_matrix(self.kind, empty_split(self.kind, shape))

    def dequantize(self, path: str, arrays: Mapping[str, mx.array]) -> mx.array:
        return split_matrix(self.kind, tuple(arrays[f"{path}.{part}"] for part in self.parts)).plain()


def read_k_quant(path: str, kind: str, shape: tuple[int, ...], arrays: Mapping[str, mx.array]) -> KQuantFormat:
    """The format of the module at `path`, whose matrix is `shape`."""
    values = arrays[f"{path}.{kind}"]
    if values.dtype == mx.uint32 and kind in SPLIT_KINDS:
        fmt: KQuantFormat = SplitFormat(kind)
        bits = SPLIT_KINDS[kind].bits
        expected = [*shape[:-1], shape[-1] * bits // 32] if shape[-1] % SPLIT_KINDS[kind].elements == 0 else None
    else:
        fmt = KQuantFormat(kind)
        fits = len(shape) in (2, 3) and kind in K_QUANTS and values.dtype == mx.uint8
        fits = fits and shape[-1] % GGML_BLOCKS[kind.upper()] == 0
        expected = [*shape[:-1], shape[-1] * K_QUANTS[kind] // 256] if fits else None
    if list(values.shape) != expected or any(f"{path}.{part}" not in arrays for part in fmt.parts):
        raise BadCheckpoint(f"{path}: {describe(values)} of {kind.upper()} do not fit a matrix {list(shape)}")
    return fmt
