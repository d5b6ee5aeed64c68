"""Headers of safetensors files, read and validated by the safetensors library before MLX opens a file.

MLX trusts what it reads; the library refuses bad JSON, unknown dtypes, gaps, overlaps and sizes that do not fit.
"""

import math
from pathlib import Path

from ...errors import BadCheckpoint, quote
from .checkpoint import LARGEST_DIMENSION, TensorInfo

BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64, "F16": 16,
    "BF16": 16, "F32": 32, "F64": 64, "C64": 64, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Every tensor of a file with a sound header."""
    return read_file(path)[0]


def read_metadata(path: Path) -> dict[str, str]:
    """The strings under `__metadata__`."""
    return read_file(path)[1]


def read_file(path: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="mlx") as file:
            slices = {name: file.get_slice(name) for name in file.offset_keys()}
            infos = {name: tensor_info(path, name, s.get_shape(), s.get_dtype()) for name, s in slices.items()}
            return infos, file.metadata() or {}
    except SafetensorError as bad:
        problem = str(bad).removeprefix("Error while deserializing header: ")[:200]
        raise BadCheckpoint(f"{path}: damaged safetensors file: {problem}; download it again") from None
    except OSError as bad:
        raise BadCheckpoint(f"{path}: cannot be read ({bad.strerror or bad}); expected a safetensors file") from None


def tensor_info(path: Path, name: str, shape: list[int], dtype: str) -> TensorInfo:
    if any(d > LARGEST_DIMENSION for d in shape):  # which only an empty tensor can have
        raise BadCheckpoint(
            f"{path}: the tensor {quote(name)} has the shape {quote(shape)}; MLX has dimensions up to "
            f"{LARGEST_DIMENSION}"
        )
    return TensorInfo(tuple(shape), dtype, math.prod(shape) * BITS[dtype] // 8)
