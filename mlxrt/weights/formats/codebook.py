"""Codebook vector quantisation: X.codes index the vectors of X.codebook.

Stored as one file per layer and projection (codebook-layer-003-up_proj.safetensors), or listed in one
codebook_config.json. An index without a vector is an error.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...errors import BadCheckpoint, UnsupportedModel, quote
from ...kernels.dtypes import FLOATS
from ...kernels.ops.codebook import dequantize_codebook
from ...models.moe import ExpertLinear
from ...models.quantized.codebook_linear import CodebookExpertLinear, CodebookLinear
from .checkpoint import LARGEST_DIMENSION
from .weight_format import WeightFormat, describe

log = logging.getLogger("mlxrt")

Arrays = dict[str, mx.array]

FILE = re.compile(r"codebook-layer-(\d{1,5})-((?:gate|up|down)_proj)\.safetensors")
CONFIG = "codebook_config.json"
CONFIG_KEY = "codebook_config"  # where folder.py puts that file's content in the config
INTEGERS = (mx.uint8, mx.uint16, mx.uint32, mx.int32, mx.int64)


@dataclass(frozen=True)
class CodebookFormat(WeightFormat):
    size: int  # vectors in the codebook
    length: int  # of each
    indices: mx.array
    codebook: mx.array

    def __str__(self) -> str:
        return f"codebook of {self.size} x {self.length}"

    @property
    def parts(self) -> tuple[str, ...]:
        return ("codes", "codebook")

    def build_module(self, plain: nn.Module, dtype: mx.Dtype) -> nn.Module:
        kind = CodebookExpertLinear if isinstance(plain, ExpertLinear) else CodebookLinear
        return kind(self.indices, self.codebook, bias="bias" in plain)

    def module_tensors(self, path: str, arrays: Mapping[str, mx.array]) -> dict[str, mx.array]:
        return {"codes": self.indices, "codebook": self.codebook}

    def dequantize(self, path: str, arrays: Mapping[str, mx.array]) -> mx.array:
        return dequantize_codebook(self.indices, self.codebook.astype(mx.float32))


def read_codebook_matrix(path: str, shape: tuple[int, ...], arrays: Mapping[str, mx.array]) -> CodebookFormat:
    indices, codebook = arrays.get(f"{path}.codes"), arrays.get(f"{path}.codebook")
    if codebook is None or codebook.dtype not in FLOATS or codebook.ndim != 2 or not codebook.size:
        raise BadCheckpoint(f"{path}.codebook: expected floats [vectors, length], found {describe(codebook)}")
    size, length = codebook.shape
    expected = [*shape[:-1], shape[-1] // length]
    if indices is None or indices.dtype not in INTEGERS or list(indices.shape) != expected or shape[-1] % length:
        raise BadCheckpoint(
            f"{path}.codes: vectors of {length} for a matrix {list(shape)} are {expected} integers, "
            f"found {describe(indices)}"
        )
    check_values(path, indices, codebook)
    unsigned = mx.issubdtype(indices.dtype, mx.unsignedinteger)
    return CodebookFormat(size, length, indices if unsigned else indices.astype(mx.uint32), codebook)


def check_values(path: str, indices: mx.array, codebook: mx.array) -> None:
    low, high = int(indices.min()), int(indices.max())
    if low < 0 or high >= codebook.shape[0]:
        raise BadCheckpoint(f"{path}.codes hold {low if low < 0 else high}, the codebook {codebook.shape[0]} vectors")
    if not bool(mx.isfinite(codebook).all()):
        raise BadCheckpoint(f"{path}.codebook holds NaN or infinities; the file is damaged")


def module_path(file: str, indices: tuple[int, ...]) -> str:
    """The module of a file codebook-layer-...; experts where its indices are three-dimensional."""
    found = FILE.fullmatch(file)
    assert found is not None
    inside = "switch_mlp." if len(indices) == 3 else ""
    return f"model.layers.{int(found[1])}.mlp.{inside}{found[2]}"


def tensor_names(file: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """The tensors of such a file -> their names in the checkpoint."""
    if set(shapes) != {"codebook", "indices"}:
        raise BadCheckpoint(f"{file}: expected the tensors codebook and indices, found {quote(sorted(shapes))}")
    path = module_path(file, shapes["indices"])
    return {"codebook": f"{path}.codebook", "indices": f"{path}.codes"}


def apply_codebook_config(config: Mapping[str, Any], arrays: Arrays) -> Arrays:
    """The tensors with the matrices that codebook_config.json lists as X.codes [out, in / g] and X.codebook."""
    listing = config.get(CONFIG_KEY)
    if listing is None:
        return arrays
    if not isinstance(listing, Mapping) or listing.get("type") != "codebook" or listing.get("format", "vq") != "vq":
        raise UnsupportedModel(f"{CONFIG}: expected type codebook and format vq, found {quote(listing)}")
    items = listing.get("tensors")
    if not isinstance(items, list) or not all(isinstance(item, Mapping) for item in items):
        raise BadCheckpoint(f"{CONFIG}: tensors must be a list of objects, found {quote(items)}")
    made: Arrays = {}
    used: set[str] = set()
    for item in items:
        path, indices, codebook, names = find_matrix(item, arrays)
        made |= reshape_indices(path, indices, codebook, read_shape(path, item))
        used |= names
    return {name: array for name, array in arrays.items() if name not in used} | made


def find_matrix(item: Mapping[str, Any], arrays: Arrays) -> tuple[str, mx.array, mx.array, set[str]]:
    name = item.get("name")
    if not isinstance(name, str) or not name:
        raise BadCheckpoint(f"{CONFIG}: a tensor needs a name, found {quote(name)}")
    names = [item.get(part, f"{name}.{part}") for part in ("codes", "codebook")]
    found = [arrays.get(n) if isinstance(n, str) else None for n in names]
    if (missing := [n for n, array in zip(names, found) if array is None]) or found[0] is None or found[1] is None:
        raise BadCheckpoint(f"{CONFIG}: {quote(name)} is in {quote(missing[0])}, which the weights do not hold")
    return name.removesuffix(".weight"), found[0], found[1], set(names)


def read_shape(path: str, item: Mapping[str, Any]) -> tuple[int, int]:
    shape = item.get("shape")
    sizes = shape if isinstance(shape, list) else []
    if len(sizes) != 2 or not all(type(n) is int and 0 < n <= LARGEST_DIMENSION for n in sizes):
        raise BadCheckpoint(f"{CONFIG}: the shape of {quote(path)} must be [out, in], found {quote(shape)}")
    return sizes[0], sizes[1]


def reshape_indices(path: str, indices: mx.array, codebook: mx.array, shape: tuple[int, int]) -> Arrays:
    """Indices as [rows, vectors of a row]; a matrix whose vectors cross rows is dequantised."""
    rows, columns = shape
    if codebook.ndim != 2 or not codebook.size or indices.dtype not in INTEGERS:
        raise BadCheckpoint(
            f"{path}: expected integer codes and a codebook [vectors, length], "
            f"found {describe(indices)} and {describe(codebook)}"
        )
    length = codebook.shape[1]
    if indices.size * length != rows * columns:
        raise BadCheckpoint(f"{path}: {indices.size} vectors of {length} do not make a matrix {[rows, columns]}")
    if columns % length == 0:
        return {f"{path}.codes": indices.reshape(rows, columns // length), f"{path}.codebook": codebook}
    check_values(path, indices, codebook)
    log.info(f"{path}: vectors of {length} cross rows of {columns}; it is dequantised")
    return {f"{path}.weight": codebook[indices.flatten()].reshape(rows, columns)}
