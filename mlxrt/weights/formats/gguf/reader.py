"""Reads the header of a GGUF file: metadata and tensor infos, every number checked against the file's size.

Our own reader, because a damaged header kills `mx.load` with a segmentation fault and `gguf.GGUFReader` is slow.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ....errors import BadCheckpoint, ModelNotFound, UnsupportedModel, quote
from ..checkpoint import LARGEST_DIMENSION

# ggml type id -> (name, elements in a block, bytes in a block)
GGML_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip

GGML_BLOCKS = {name: elements for name, elements, _ in GGML_TYPES.values()}

# metadata value type id -> numpy type of a scalar
SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "|b1", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
STRING, ARRAY = 8, 9
MAX_ARRAY_DEPTH = 4  # the format has no limit, the interpreter's stack does

MIN_PAIR_BYTES = 8 + 4 + 1  # an empty key, its type, one byte of value
MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8  # a one-letter name, one dimension

U32, U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor is and its type. The shape is row-major, slowest dimension first (reversed from the file)."""

    name: str
    shape: tuple[int, ...]
    ggml_type: str
    offset: int  # from the start of the file
    nbytes: int


@dataclass(frozen=True)
class GGUFFile:
    """An open file with a sound header: all tensors are inside it and none overlap."""

    path: Path
    metadata: dict[str, Any]  # plain Python values
    tensors: dict[str, GGUFTensor]
    data: mmap.mmap
    value_spans: dict[str, tuple[int, int]]  # key -> where its value is, with its type

    def value_bytes(self, key: str) -> bytes:
        """A metadata value as it is stored: its type, which plain Python values have lost, and its bytes."""
        start, end = self.value_spans[key]
        return self.data[start:end]

    def tensor_bytes(self, tensor: GGUFTensor) -> np.ndarray:
        """The stored bytes of a tensor, not copied."""
        return np.frombuffer(self.data, np.uint8, tensor.nbytes, tensor.offset)

    def release_pages(self) -> None:
        """Give back the memory of what was read so far: the file is still there to be read again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self.data.madvise(mmap.MADV_DONTNEED)


class Cursor:
    """A bounds-checked position in the file."""

    def __init__(self, data: mmap.mmap, path: Path):
        self.data, self.path, self.position = data, path, 0

    def damaged(self, problem: str) -> BadCheckpoint:
        return BadCheckpoint(f"{self.path}: damaged GGUF at byte {self.position}: {problem}; download the file again")

    @property
    def left(self) -> int:
        return len(self.data) - self.position

    def advance(self, count: int, what: str) -> int:
        """Advance by `count` bytes; the position before."""
        if count > self.left:
            raise self.damaged(f"{what} needs {count} bytes, the file has {self.left} left")
        self.position += count
        return self.position - count

    def u32(self, what: str) -> int:
        return U32.unpack_from(self.data, self.advance(4, what))[0]

    def u64(self, what: str) -> int:
        return U64.unpack_from(self.data, self.advance(8, what))[0]

    def string(self, what: str) -> str:
        start = self.advance(self.u64(what), what)
        try:
            return str(self.data[start : self.position], "utf-8")
        except UnicodeDecodeError as bad:
            raise self.damaged(f"{what} is not UTF-8 ({bad.reason})") from None

    def scalars(self, kind: int, count: int, what: str) -> list:
        dtype = np.dtype(SCALARS[kind])
        start = self.advance(count * dtype.itemsize, what)
        return np.frombuffer(self.data, dtype, count, start).tolist()

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        if kind in SCALARS:
            return self.scalars(kind, 1, what)[0]
        if kind == STRING:
            return self.string(what)
        if kind == ARRAY:
            return self.array(what, depth + 1)
        raise self.damaged(f"{what} has the unknown value type {kind}")

    def array(self, what: str, depth: int) -> list:
        if depth > MAX_ARRAY_DEPTH:
            raise self.damaged(f"{what} nests arrays deeper than {MAX_ARRAY_DEPTH}")
        kind, count = self.u32(what), self.u64(what)
        if kind in SCALARS:
            return self.scalars(kind, count, what)
        smallest = 8 if kind == STRING else 12
        if count * smallest > self.left:
            raise self.damaged(f"{what} claims {count} elements, the file has {self.left} bytes left")
        if kind == STRING:
            return self.strings(count, what)
        return [self.value(kind, what, depth) for _ in range(count)]

    def strings(self, count: int, what: str) -> list[str]:
        """`count` strings. Inlined, because vocabularies have hundreds of thousands."""
        data, size, unpack = self.data, len(self.data), U64.unpack_from
        found: list[str] = []
        while len(found) < count and self.position + 8 <= size:
            start = self.position + 8
            end = start + unpack(data, self.position)[0]
            if end > size:
                break
            self.position = end
            try:
                found.append(str(data[start:end], "utf-8"))
            except UnicodeDecodeError as bad:
                raise self.damaged(f"{what} is not UTF-8 ({bad.reason})") from None
        return found + [self.string(what) for _ in range(count - len(found))]  # out of bounds: raises


def read_gguf(path: Path) -> GGUFFile:
    """Open a GGUF file and check its header."""
    cursor = Cursor(map_file(path), path)
    check_version(cursor)
    tensor_count, pair_count = cursor.u64("the tensor count"), cursor.u64("the metadata count")
    if pair_count * MIN_PAIR_BYTES + tensor_count * MIN_TENSOR_BYTES > cursor.left:
        raise cursor.damaged(f"{pair_count} keys and {tensor_count} tensors cannot fit in {cursor.left} bytes")
    metadata, spans = read_metadata(cursor, pair_count)
    infos = [read_tensor_info(cursor) for _ in range(tensor_count)]
    tensors = resolve_offsets(cursor, infos, read_alignment(cursor, metadata))
    return GGUFFile(path, metadata, tensors, cursor.data, spans)


def map_file(path: Path) -> mmap.mmap:
    try:
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelNotFound(f"{path}: no such file") from None
    except ValueError:  # mmap of an empty file
        raise BadCheckpoint(f"{path}: the file is empty, expected GGUF; download it again") from None
    except OSError as bad:
        raise BadCheckpoint(f"{path}: cannot be read ({bad.strerror}), expected a GGUF file") from None


def check_version(cursor: Cursor) -> None:
    magic = bytes(cursor.data[:4])
    if magic != b"GGUF":
        raise BadCheckpoint(f"{cursor.path}: not a GGUF file (begins with {magic!r}, expected b'GGUF')")
    cursor.position = 4
    version = cursor.u32("the version")
    if version in (2, 3):
        return
    if version and version & 0xFFFF == 0:
        raise UnsupportedModel(f"{cursor.path}: big-endian GGUF is not supported; convert it to little-endian")
    raise UnsupportedModel(f"{cursor.path}: GGUF version {version} is not supported (2 and 3 are); convert it again")


def read_metadata(cursor: Cursor, count: int) -> tuple[dict[str, Any], dict[str, tuple[int, int]]]:
    """The values by key, and where they are."""
    metadata: dict[str, Any] = {}
    spans: dict[str, tuple[int, int]] = {}
    for _ in range(count):
        key = cursor.string("a metadata key")
        if key in metadata:
            raise cursor.damaged(f"the key {quote(key)} appears twice")
        start = cursor.position
        metadata[key] = cursor.value(cursor.u32(f"the type of {quote(key)}"), f"the value of {quote(key)}")
        spans[key] = start, cursor.position
    return metadata, spans


def read_tensor_info(cursor: Cursor) -> GGUFTensor:
    """A tensor info, with its offset from the start of the data."""
    name = cursor.string("a tensor name")
    what = f"the tensor {quote(name)}"
    rank = cursor.u32(what)
    if not name or not 1 <= rank <= 4:
        raise cursor.damaged(f"{what} has {rank} dimensions, expected a named tensor with 1 to 4")
    dims = [cursor.u64(what) for _ in range(rank)]
    kind, offset = cursor.u32(what), cursor.u64(what)
    if not all(1 <= d <= LARGEST_DIMENSION for d in dims):
        raise cursor.damaged(f"{what} has dimensions {dims}, expected 1 to {LARGEST_DIMENSION}")
    if kind not in GGML_TYPES:
        raise UnsupportedModel(f"{cursor.path}: {what} has ggml type {kind}, which mlxrt does not know")
    label, block, width = GGML_TYPES[kind]
    if dims[0] % block:
        raise cursor.damaged(f"{what} has rows of {dims[0]}, not a multiple of {label}'s block of {block}")
    return GGUFTensor(name, tuple(reversed(dims)), label, offset, math.prod(dims) // block * width)


def read_alignment(cursor: Cursor, metadata: dict[str, Any]) -> int:
    value = metadata.get("general.alignment", 32)  # the format's default
    if type(value) is not int or not 1 <= value <= 2**20 or value & (value - 1):
        raise cursor.damaged(f"general.alignment is {quote(value)}, expected a power of two")
    return value


def resolve_offsets(cursor: Cursor, infos: list[GGUFTensor], alignment: int) -> dict[str, GGUFTensor]:
    """Tensors by name with offsets from the start of the file; none outside it, none overlapping."""
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for r in infos:
        if r.name in tensors:
            raise cursor.damaged(f"the tensor {quote(r.name)} appears twice")
        if r.offset % alignment:
            raise cursor.damaged(f"the tensor {quote(r.name)} is at {r.offset}, not a multiple of {alignment}")
        tensors[r.name] = GGUFTensor(r.name, r.shape, r.ggml_type, start + r.offset, r.nbytes)
    end, before = start, "the header"
    for r in sorted(tensors.values(), key=lambda r: r.offset):
        if r.offset < end:
            raise cursor.damaged(f"the tensors {quote(before)} and {quote(r.name)} overlap")
        end, before = r.offset + r.nbytes, r.name
    if end > len(cursor.data) and tensors:
        raise cursor.damaged(f"{quote(before)} ends at byte {end}, the file has {len(cursor.data)}: it is truncated")
    return tensors
