"""The header of a safetensors file, checked whole before MLX opens the file.

Knows bytes, offsets and shapes. Refuses to know what the tensors are for or which dtypes a model can use.
"""

import struct
from pathlib import Path
from typing import Any, NoReturn

from ...errors import BadCheckpoint, shown
from .checkpoint import LARGEST_DIMENSION, TensorInfo
from .json_text import parse_object

BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64, "F16": 16,
    "BF16": 16, "F32": 32, "F64": 64, "C64": 64, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
LONGEST_HEADER = 100_000_000  # the format's own limit


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Every tensor of a file whose header is sound: contiguous, inside the file, sizes as the shapes say."""
    entries, room = read_entries(path)
    spans: list[tuple[int, int, str]] = []
    infos: dict[str, TensorInfo] = {}
    for name, entry in entries.items():
        if name == "__metadata__":
            check_metadata(path, entry)
            continue
        infos[name], begin = read_entry(path, name, entry)
        spans.append((begin, begin + infos[name].nbytes, name))
    end = 0
    for begin, stop, name in sorted(spans):
        if begin != end:
            damaged(path, f"the tensor {shown(name)} begins at {begin}, the one before it ends at {end}")
        end = stop
    if end != room:
        damaged(path, f"the tensors take {end} bytes, the file holds {room}")
    return infos


def damaged(path: Path, problem: str) -> NoReturn:
    raise BadCheckpoint(f"{path}: damaged safetensors file: {problem}; download it again")


def read_entries(path: Path) -> tuple[dict[str, Any], int]:
    """The header's JSON object and the number of bytes after it."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            first = file.read(8)
            length = struct.unpack("<Q", first)[0] if len(first) == 8 else damaged(path, f"only {size} bytes long")
            if length > min(size - 8, LONGEST_HEADER):
                damaged(path, f"a header of {length} bytes in a file of {size} (at most {LONGEST_HEADER})")
            text = file.read(length)
    except OSError as bad:
        raise BadCheckpoint(f"{path}: cannot be read ({bad.strerror}); expected a safetensors file") from None
    return parse(path, text), size - 8 - length


def parse(path: Path, text: bytes) -> dict[str, Any]:
    try:
        return parse_object(text)
    except ValueError as bad:
        damaged(path, f"the header is not usable JSON ({str(bad)[:120]})")


def check_metadata(path: Path, entry: Any) -> None:
    if entry is None:
        return  # what mx.save_safetensors writes when it is given none
    if not isinstance(entry, dict) or not all(isinstance(v, str) for v in entry.values()):
        damaged(path, "__metadata__ must be an object of strings")


def read_entry(path: Path, name: str, entry: Any) -> tuple[TensorInfo, int]:
    """A tensor and where its bytes begin."""
    what = f"the tensor {shown(name)}"
    if not isinstance(entry, dict):
        damaged(path, f"{what} is described by a {type(entry).__name__}, expected an object")
    dtype: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    span: Any = entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in BITS:
        damaged(path, f"{what} has the unknown dtype {shown(dtype)}")
    if not whole(shape) or any(d > LARGEST_DIMENSION for d in shape):
        damaged(path, f"{what} has the shape {shown(shape)}, expected whole numbers up to {LARGEST_DIMENSION}")
    if not whole(span) or len(span) != 2 or span[0] > span[1]:
        damaged(path, f"{what} has data_offsets {shown(span)}, expected [begin, end]")
    bits = BITS[dtype]
    for d in shape:
        bits *= d
    if bits != 8 * (span[1] - span[0]):
        damaged(
            path, f"{what} is {dtype} {shown(shape)}, {bits // 8} bytes, but its data_offsets span {span[1] - span[0]}"
        )
    return TensorInfo(tuple(shape), dtype, span[1] - span[0]), span[0]


def whole(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and v >= 0 for v in values)
