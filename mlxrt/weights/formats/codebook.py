"""Matrices as numbers of short vectors (codebook VQ): X.codes and X.codebook, from either of the two ways of storing.

One file per layer and projection (codebook-layer-003-up_proj.safetensors), or one codebook_config.json that lists the
matrices. Refuses to guess: a code without a vector is an error.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...errors import BadCheckpoint, UnsupportedModel, shown
from ...kernels.ops.codebook import dequantize_codebook
from ...models.moe import ExpertLinear
from ...models.quantized.codebook_linear import VectorExpertLinear, VectorLinear
from .checkpoint import LARGEST_DIMENSION
from .int_matrix import described
from .quantized import FLOATS
from .weight_format import Stored

log = logging.getLogger("mlxrt")

Arrays = dict[str, mx.array]

FILE = re.compile(r"codebook-layer-(\d{1,5})-((?:gate|up|down)_proj)\.safetensors")
CONFIG = "codebook_config.json"
LISTS = "codebook_config"  # where folder.py puts what that file says, in the config
WHOLE = (mx.uint8, mx.uint16, mx.uint32, mx.int32, mx.int64)


@dataclass(frozen=True)
class Vectors(Stored):
    size: int  # vectors in the codebook
    length: int  # of each
    codes: mx.array
    codebook: mx.array

    def __str__(self) -> str:
        return f"codebook of {self.size} x {self.length}"

    @property
    def parts(self) -> tuple[str, ...]:
        return ("codes", "codebook")

    def module(self, plain: nn.Module, dtype: mx.Dtype) -> nn.Module:
        kind = VectorExpertLinear if isinstance(plain, ExpertLinear) else VectorLinear
        return kind(self.codes, self.codebook, bias="bias" in plain)

    def tensors(self, path: str, arrays: Mapping[str, mx.array]) -> dict[str, mx.array]:
        return {"codes": self.codes, "codebook": self.codebook}

    def matrix(self, path: str, arrays: Mapping[str, mx.array]) -> mx.array:
        return dequantize_codebook(self.codes, self.codebook.astype(mx.float32))


def read_vectors(path: str, shape: tuple[int, ...], arrays: Mapping[str, mx.array]) -> Vectors:
    codes, codebook = arrays.get(f"{path}.codes"), arrays.get(f"{path}.codebook")
    if codebook is None or codebook.dtype not in FLOATS or codebook.ndim != 2 or not codebook.size:
        raise BadCheckpoint(f"{path}.codebook: expected floats [vectors, length], found {described(codebook)}")
    size, length = codebook.shape
    expected = [*shape[:-1], shape[-1] // length]
    fits = codes is not None and codes.dtype in WHOLE and list(codes.shape) == expected and shape[-1] % length == 0
    if codes is None or not fits:
        raise BadCheckpoint(
            f"{path}.codes: vectors of {length} for a matrix {list(shape)} are {expected} whole numbers, "
            f"found {described(codes)}"
        )
    check_values(path, codes, codebook)
    return Vectors(
        size, length, codes if mx.issubdtype(codes.dtype, mx.unsignedinteger) else codes.astype(mx.uint32), codebook
    )


def check_values(path: str, codes: mx.array, codebook: mx.array) -> None:
    low, high = int(codes.min()), int(codes.max())
    if low < 0 or high >= codebook.shape[0]:
        raise BadCheckpoint(
            f"{path}.codes hold {low if low < 0 else high}, the codebook has {codebook.shape[0]} vectors"
        )
    if not bool(mx.isfinite(codebook).all()):
        raise BadCheckpoint(f"{path}.codebook holds NaN or infinities; the file is damaged")


def module_path(file: str, indices: tuple[int, ...]) -> str:
    """The module a file named codebook-layer-... belongs to: experts where its indices are of many matrices."""
    found = FILE.fullmatch(file)
    assert found is not None
    inside = "switch_mlp." if len(indices) == 3 else ""
    return f"model.layers.{int(found[1])}.mlp.{inside}{found[2]}"


def tensor_names(file: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """The tensors of such a file -> their names among those of all files."""
    if set(shapes) != {"codebook", "indices"}:
        raise BadCheckpoint(f"{file}: expected the tensors codebook and indices, found {shown(sorted(shapes))}")
    path = module_path(file, shapes["indices"])
    return {"codebook": f"{path}.codebook", "indices": f"{path}.codes"}


def listed(config: Mapping[str, Any], arrays: Arrays) -> Arrays:
    """The matrices that codebook_config.json lists, as X.codes [out, in / g] and X.codebook."""
    given = config.get(LISTS)
    if given is None:
        return arrays
    if not isinstance(given, Mapping) or given.get("type") != "codebook" or given.get("format", "vq") != "vq":
        raise UnsupportedModel(f"{CONFIG}: expected type codebook and format vq, found {shown(given)}")
    entries = given.get("tensors")
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        raise BadCheckpoint(f"{CONFIG}: tensors must be a list of objects, found {shown(entries)}")
    made: Arrays = {}
    used: set[str] = set()
    for entry in entries:
        path, codes, codebook, names = listed_matrix(entry, arrays)
        made |= arranged(path, codes, codebook, sizes_of(path, entry))
        used |= names
    return {name: array for name, array in arrays.items() if name not in used} | made


def listed_matrix(entry: Mapping[str, Any], arrays: Arrays) -> tuple[str, mx.array, mx.array, set[str]]:
    name = entry.get("name")
    if not isinstance(name, str) or not name:
        raise BadCheckpoint(f"{CONFIG}: a tensor needs a name, found {shown(name)}")
    names = [entry.get(part, f"{name}.{part}") for part in ("codes", "codebook")]
    found = [arrays.get(n) if isinstance(n, str) else None for n in names]
    if (lost := [n for n, array in zip(names, found) if array is None]) or found[0] is None or found[1] is None:
        raise BadCheckpoint(f"{CONFIG}: {shown(name)} is in {shown(lost[0])}, which the weights do not hold")
    return name.removesuffix(".weight"), found[0], found[1], set(names)


def sizes_of(path: str, entry: Mapping[str, Any]) -> tuple[int, int]:
    shape = entry.get("shape")
    if (
        not isinstance(shape, list)
        or len(shape) != 2
        or not all(type(n) is int and 0 < n <= LARGEST_DIMENSION for n in shape)
    ):
        raise BadCheckpoint(f"{CONFIG}: the shape of {shown(path)} must be [out, in], found {shown(shape)}")
    return shape[0], shape[1]


def arranged(path: str, codes: mx.array, codebook: mx.array, shape: tuple[int, int]) -> Arrays:
    """Codes row by row; a matrix whose vectors reach across rows is unpacked, since no row can be read alone."""
    rows, columns = shape
    if codebook.ndim != 2 or not codebook.size or codes.dtype not in WHOLE:
        raise BadCheckpoint(
            f"{path}: expected codes as whole numbers and a codebook [vectors, length], "
            f"found {described(codes)} and {described(codebook)}"
        )
    length = codebook.shape[1]
    if codes.size * length != rows * columns:
        raise BadCheckpoint(f"{path}: {codes.size} vectors of {length} do not make a matrix {[rows, columns]}")
    if columns % length == 0:
        return {f"{path}.codes": codes.reshape(rows, columns // length), f"{path}.codebook": codebook}
    check_values(path, codes, codebook)
    log.info(f"{path}: vectors of {length} reach across rows of {columns}; it is kept unpacked")
    return {f"{path}.weight": codebook[codes.flatten()].reshape(rows, columns)}
