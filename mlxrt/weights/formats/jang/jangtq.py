"""JANGTQ (MXTQ) version 1: X.tq_packed, X.tq_norms and X.tq_bits. Centroids and signs are computed, never read.

The sidecar of some checkpoints (jangtq_runtime.safetensors) is only compared with the computed values.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ....errors import BadCheckpoint, quote
from ....kernels.dtypes import FLOATS
from ....models.moe import ExpertLinear
from ....models.quantized.centroids import lloyd_max
from ....models.quantized.lut_linear import LUTEncoding, LUTExpertLinear, LUTLinear
from ....models.quantized.rotation import random_signs
from ..hadamard import AwqScale, find_awq_scale
from ..weight_format import Arrays, WeightFormat, describe

BITS = (1, 2, 3, 4, 8)
MAX_WIDTH = 1 << 20  # no layer is wider, and a damaged number must not be computed with
JANGTQ_PARTS = ("tq_packed", "tq_norms", "tq_bits")
JANGTQ2_PARTS = ("tq2_packed", "tq2_scales")


@dataclass(frozen=True)
class LUTFormat(WeightFormat):
    """Rows of centroid indices with a norm each, of either version."""

    coding: LUTEncoding
    names: tuple[str, ...]  # packed indices, norms and what else is stored
    awq_scale: AwqScale | None = None

    def __str__(self) -> str:
        return f"{self.coding}" + (" with awq scales" if self.awq_scale else "")

    @property
    def bits(self) -> int:
        return self.coding.bits

    @property
    def parts(self) -> tuple[str, ...]:
        return (*self.names, self.awq_scale.name) if self.awq_scale else self.names

    def build_module(self, plain: nn.Module, dtype: mx.Dtype) -> nn.Module:
        shape, by = plain["weight"].shape, self.awq_scale.shape if self.awq_scale else ()
        if isinstance(plain, ExpertLinear):
            return LUTExpertLinear(self.coding, shape[0], shape[1], bias="bias" in plain, divisor=by)
        return LUTLinear(self.coding, shape[0], bias="bias" in plain, divisor=by)

    def module_tensors(self, path: str, arrays: Mapping[str, mx.array]) -> dict[str, mx.array]:
        own = {"words": self.packed(path, arrays), "norms": self.norms(path, arrays)}
        return own | {"divisor": arrays[f"{path}.{self.awq_scale.name}"]} if self.awq_scale else own

    def dequantize(self, path: str, arrays: Mapping[str, mx.array]) -> mx.array:
        rows = self.coding.matrix(self.packed(path, arrays), self.norms(path, arrays))
        return self.awq_scale.fold(rows, path, arrays) if self.awq_scale else rows

    def packed(self, path: str, arrays: Mapping[str, mx.array]) -> mx.array:
        return arrays[f"{path}.{self.names[0]}"]

    def norms(self, path: str, arrays: Mapping[str, mx.array]) -> mx.array:
        return arrays[f"{path}.{self.names[1]}"]


def read_jangtq(path: str, shape: tuple[int, ...], arrays: Mapping[str, mx.array], seed: int) -> LUTFormat:
    """The format of the module at `path`, whose matrix is of `shape`."""
    bits = read_bits(path, arrays)
    coding = LUTEncoding.jangtq(bits, shape[-1], seed)
    check_rows(path, JANGTQ_PARTS, shape, coding, arrays)
    return LUTFormat(coding, JANGTQ_PARTS, find_awq_scale(path, shape, arrays))


def read_bits(path: str, arrays: Mapping[str, mx.array]) -> int:
    """One value; where experts were stored one by one, the same from each."""
    found = arrays.get(f"{path}.tq_bits")
    if found is None or not mx.issubdtype(found.dtype, mx.integer) or not 0 < found.size <= MAX_WIDTH:
        raise BadCheckpoint(f"{path}.tq_bits: expected one integer, found {describe(found)}")
    values = set(np.array(found).reshape(-1).tolist())
    if len(values) > 1:
        raise BadCheckpoint(f"{path}.tq_bits: the experts of one layer must have the same, found {sorted(values)}")
    bits = int(values.pop())
    if bits not in BITS:
        raise BadCheckpoint(f"{path}.tq_bits = {bits}; JANGTQ has {', '.join(map(str, BITS))} bit")
    return bits


def check_rows(path: str, names: tuple[str, ...], shape: tuple[int, ...], coding: LUTEncoding, arrays: Arrays) -> None:
    packed, norms = (arrays.get(f"{path}.{name}") for name in names[:2])
    expected = [*shape[:-1], coding.words]
    if packed is None or packed.dtype != mx.uint32 or list(packed.shape) != expected:
        raise BadCheckpoint(f"{path}.{names[0]}: expected uint32 {expected} for {coding}, found {describe(packed)}")
    if norms is None or norms.dtype not in FLOATS or norms.shape != shape[:-1]:
        raise BadCheckpoint(f"{path}.{names[1]}: expected floats {list(shape[:-1])}, found {describe(norms)}")
    if not bool(mx.isfinite(norms).all()):
        raise BadCheckpoint(f"{path}.{names[1]} holds NaN or infinities; the file is damaged")


def check_sidecar(name: str, arrays: Mapping[str, mx.array]) -> int:
    """Compare every tensor with the computed one; the number of tensors."""
    for key, array in arrays.items():
        found = re.fullmatch(r"(signs|codebook)\.(\d{1,7})\.(\d{1,10})", key)
        if not found or int(found[2]) > MAX_WIDTH or (found[1] == "codebook" and int(found[3]) not in BITS):
            raise BadCheckpoint(f"{name}: {quote(key)} does not belong there; remove the file, it is not needed")
        width, last = int(found[2]), int(found[3])
        expected = random_signs(width, last) if found[1] == "signs" else lloyd_max(width, last)
        values = np.array(array.astype(mx.float32))
        if values.shape != expected.shape or not np.allclose(values, expected, rtol=1e-5, atol=1e-7):
            raise BadCheckpoint(f"{name}: {quote(key)} is not what the format computes; the checkpoint is damaged")
    return len(arrays)
