"""JANGTQ (MXTQ), version 1: X.tq_packed, X.tq_norms and X.tq_bits. Levels and signs are computed, never read.

The sidecar some bundles bring (jangtq_runtime.safetensors) is compared with what was computed and
used for nothing else.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ....errors import BadCheckpoint, shown
from ....models.moe import ExpertLinear
from ....models.quantized.centroids import lloyd_max
from ....models.quantized.lut_linear import CodedExpertLinear, CodedLinear, Coding
from ....models.quantized.rotation import random_signs
from ..hadamard import Divisor, divisor_of
from ..int_matrix import described
from ..quantized import FLOATS
from ..weight_format import Stored

BITS = (1, 2, 3, 4, 8)
WIDEST = 1 << 20  # of a sidecar's entry: no layer is wider, and a damaged number must not be computed
PARTS = ("tq_packed", "tq_norms", "tq_bits")
PARTS2 = ("tq2_packed", "tq2_scales")


@dataclass(frozen=True)
class Coded(Stored):
    """Rows of codes and norms, of either version."""

    coding: Coding
    names: tuple[str, ...]  # words, norms and what else is stored
    divisor: Divisor | None = None

    def __str__(self) -> str:
        return f"{self.coding}" + (" with awq scales" if self.divisor else "")

    @property
    def bits(self) -> int:
        return self.coding.bits

    @property
    def parts(self) -> tuple[str, ...]:
        return (*self.names, self.divisor.name) if self.divisor else self.names

    def module(self, plain: nn.Module, dtype: mx.Dtype) -> nn.Module:
        shape, by = plain["weight"].shape, self.divisor.shape if self.divisor else ()
        if isinstance(plain, ExpertLinear):
            return CodedExpertLinear(self.coding, shape[0], shape[1], bias="bias" in plain, divisor=by)
        return CodedLinear(self.coding, shape[0], bias="bias" in plain, divisor=by)

    def tensors(self, path: str, arrays: Mapping[str, mx.array]) -> dict[str, mx.array]:
        own = {"words": self.words(path, arrays), "norms": self.norms(path, arrays)}
        return own | {"divisor": arrays[f"{path}.{self.divisor.name}"]} if self.divisor else own

    def matrix(self, path: str, arrays: Mapping[str, mx.array]) -> mx.array:
        rows = self.coding.matrix(self.words(path, arrays), self.norms(path, arrays))
        return self.divisor.undo(rows, path, arrays) if self.divisor else rows

    def words(self, path: str, arrays: Mapping[str, mx.array]) -> mx.array:
        return arrays[f"{path}.{self.names[0]}"]

    def norms(self, path: str, arrays: Mapping[str, mx.array]) -> mx.array:
        return arrays[f"{path}.{self.names[1]}"]


def read_jangtq(path: str, shape: tuple[int, ...], arrays: Mapping[str, mx.array], seed: int) -> Coded:
    """The coding of the module at `path`, whose matrix is of `shape`."""
    bits = bits_of(path, arrays)
    coding = Coding.jangtq(bits, shape[-1], seed)
    check_rows(path, PARTS, shape, coding, arrays)
    return Coded(coding, PARTS, divisor_of(path, shape, arrays))


def bits_of(path: str, arrays: Mapping[str, mx.array]) -> int:
    """One number; where experts were stored one by one, the same number from each."""
    found = arrays.get(f"{path}.tq_bits")
    if found is None or not mx.issubdtype(found.dtype, mx.integer) or not 0 < found.size <= WIDEST:
        raise BadCheckpoint(f"{path}.tq_bits: expected one whole number, found {described(found)}")
    given = set(np.array(found).reshape(-1).tolist())
    if len(given) > 1:
        raise BadCheckpoint(f"{path}.tq_bits: the experts of one layer must have the same, found {sorted(given)}")
    bits = int(given.pop())
    if bits not in BITS:
        raise BadCheckpoint(f"{path}.tq_bits = {bits}; JANGTQ has {', '.join(map(str, BITS))} bit")
    return bits


def check_rows(
    path: str, names: tuple[str, ...], shape: tuple[int, ...], coding: Coding, arrays: Mapping[str, mx.array]
) -> None:
    words, norms = (arrays.get(f"{path}.{name}") for name in names[:2])
    expected = [*shape[:-1], coding.words]
    if words is None or words.dtype != mx.uint32 or list(words.shape) != expected:
        raise BadCheckpoint(
            f"{path}.{names[0]}: {coding} of {shape[-1]} inputs is uint32 {expected}, found {described(words)}"
        )
    if norms is None or norms.dtype not in FLOATS or norms.shape != shape[:-1]:
        raise BadCheckpoint(f"{path}.{names[1]}: expected floats {list(shape[:-1])}, found {described(norms)}")
    if not bool(mx.isfinite(norms).all()):
        raise BadCheckpoint(f"{path}.{names[1]} holds NaN or infinities; the file is damaged")


def check_sidecar(name: str, arrays: Mapping[str, mx.array]) -> int:
    """Compare every entry with what it must be; how many there were."""
    for key, array in arrays.items():
        found = re.fullmatch(r"(signs|codebook)\.(\d{1,7})\.(\d{1,10})", key)
        if not found or int(found[2]) > WIDEST or (found[1] == "codebook" and int(found[3]) not in BITS):
            raise BadCheckpoint(f"{name}: {shown(key)} is no entry of such a file; remove the file, it is not needed")
        width, last = int(found[2]), int(found[3])
        true = random_signs(width, last) if found[1] == "signs" else lloyd_max(width, last)
        given = np.array(array.astype(mx.float32))
        if given.shape != true.shape or not np.allclose(given, true, rtol=1e-5, atol=1e-7):
            raise BadCheckpoint(
                f"{name}: {shown(key)} is not what the format computes; the bundle was made otherwise or is damaged"
            )
    return len(arrays)
