"""Writes a GGUF file: header, metadata and tensor infos first, then the tensors one after the other.

A file appears under its name when it is complete: until then it has a temporary one. Only one tensor's bytes, or a part
of them, are in memory at a time.
"""

import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from .reader import ARRAY, GGML_TYPES, SCALARS, STRING

ALIGNMENT = 32  # the format's default
TYPE_IDS = {name: number for number, (name, _, _) in GGML_TYPES.items()}
BLOCK_SIZES = {name: (elements, nbytes) for name, elements, nbytes in GGML_TYPES.values()}
SCALAR_IDS = {dtype: number for number, dtype in SCALARS.items()}
# What Python values become: llama.cpp reads numbers of one type only.
PYTHON_TYPES = {bool: "|b1", int: "<u4", float: "<f4"}
LIST_TYPES = PYTHON_TYPES | {int: "<i4"}


@dataclass(frozen=True)
class RawValue:
    """A metadata value as another file has it: its type and its bytes."""

    data: bytes


@dataclass(frozen=True)
class TensorPlan:
    """A tensor to be written. `parts` makes its bytes when it is its turn."""

    name: str
    shape: tuple[int, ...]
    ggml_type: str
    parts: Callable[[], Iterable[np.ndarray]]

    @property
    def count(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        return stored_bytes(self.shape, self.ggml_type)


def stored_bytes(shape: Sequence[int], ggml_type: str) -> int:
    elements, nbytes = BLOCK_SIZES[ggml_type]
    return int(np.prod(shape, dtype=np.int64)) // elements * nbytes


def pack_string(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(data)) + data


def pack_value(value: Any) -> bytes:
    """The type and the bytes of a value: a bool, int, float or str, or a list of one of them."""
    if isinstance(value, RawValue):
        return value.data
    if isinstance(value, str):
        return struct.pack("<I", STRING) + pack_string(value)
    if isinstance(value, list):
        return struct.pack("<I", ARRAY) + pack_list(value)
    dtype = PYTHON_TYPES[type(value)]
    return struct.pack("<I", SCALAR_IDS[dtype]) + np.array(value, dtype).tobytes()


def pack_list(values: list) -> bytes:
    if not values or isinstance(values[0], str):
        return struct.pack("<IQ", STRING, len(values)) + b"".join(map(pack_string, values))
    dtype = LIST_TYPES[type(values[0])]
    return struct.pack("<IQ", SCALAR_IDS[dtype], len(values)) + np.array(values, dtype).tobytes()


def pack_header(metadata: Mapping[str, Any], tensors: Sequence[TensorPlan]) -> bytes:
    """Everything before the first tensor."""
    parts = [struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))]
    for key, value in metadata.items():
        parts += [pack_string(key), pack_value(value)]
    offset = 0
    for tensor in tensors:
        dims = tuple(reversed(tensor.shape))
        shape = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        parts += [pack_string(tensor.name), shape, struct.pack("<IQ", TYPE_IDS[tensor.ggml_type], offset)]
        offset += pad(tensor.nbytes)
    header = b"".join(parts)
    return header.ljust(pad(len(header)), b"\0")


def pad(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


def file_bytes(metadata: Mapping[str, Any], tensors: Sequence[TensorPlan]) -> int:
    return len(pack_header(metadata, tensors)) + sum(pad(tensor.nbytes) for tensor in tensors)


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Sequence[TensorPlan],
    on_tensor: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write the new file `path`; whatever goes wrong, it is complete or not there."""
    temporary = path.with_name(f".{path.name}.writing")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(temporary, "wb") as file:
            file.write(pack_header(metadata, tensors))
            write_tensors(file, tensors, on_tensor)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_tensors(file: IO[bytes], tensors: Sequence[TensorPlan], on_tensor: Callable[[int, int], None]) -> None:
    done, total = 0, sum(tensor.count for tensor in tensors)
    for tensor in tensors:
        written = 0
        for part in tensor.parts():
            written += file.write(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
        assert written == tensor.nbytes, f"{tensor.name}: {written} bytes, {tensor.nbytes} expected"
        file.write(bytes(pad(written) - written))
        done += tensor.count
        on_tensor(done, total)
