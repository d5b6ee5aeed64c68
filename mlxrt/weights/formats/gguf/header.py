"""The directory of a GGUF file: metadata and where each tensor lies, every number checked against the file's size.

Exists because a damaged header kills `mx.load` with a segmentation fault. Refuses to know what the keys mean.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ....errors import BadCheckpoint, ModelNotFound, UnsupportedModel, shown
from ..checkpoint import LARGEST_DIMENSION

# ggml type id -> (name, elements in a block, bytes in a block)
KINDS: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip

# metadata value type id -> numpy type of a plain number
NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "|b1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
STRING, ARRAY = 8, 9
DEEPEST_ARRAY = 4  # the format sets no limit; the interpreter's stack does

SHORTEST_PAIR = 8 + 4 + 1  # an empty key, its type, one byte of value
SHORTEST_RECORD = 8 + 1 + 4 + 8 + 4 + 8  # a one-letter name, one dimension

U32, U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True)
class TensorRecord:
    """One tensor: where it lies and how. The shape is row-major, slowest dimension first (the file's reversed)."""

    name: str
    shape: tuple[int, ...]
    kind: str
    offset: int  # from the start of the file
    nbytes: int


@dataclass(frozen=True)
class Directory:
    """A file that was opened and found sound: all records lie inside it and none overlap."""

    path: Path
    metadata: dict[str, Any]  # plain Python values
    tensors: dict[str, TensorRecord]
    data: mmap.mmap

    def bytes_of(self, record: TensorRecord) -> np.ndarray:
        """The stored bytes of a tensor, not copied."""
        return np.frombuffer(self.data, np.uint8, record.nbytes, record.offset)


class Cursor:
    """A position in the file that cannot leave it."""

    def __init__(self, data: mmap.mmap, path: Path):
        self.data, self.path, self.position = data, path, 0

    def damaged(self, problem: str) -> BadCheckpoint:
        return BadCheckpoint(f"{self.path}: damaged GGUF at byte {self.position}: {problem}; download the file again")

    @property
    def left(self) -> int:
        return len(self.data) - self.position

    def take(self, count: int, what: str) -> int:
        """Step over `count` bytes; where they begin."""
        if count > self.left:
            raise self.damaged(f"{what} needs {count} bytes, the file has {self.left} left")
        self.position += count
        return self.position - count

    def u32(self, what: str) -> int:
        return U32.unpack_from(self.data, self.take(4, what))[0]

    def u64(self, what: str) -> int:
        return U64.unpack_from(self.data, self.take(8, what))[0]

    def text(self, what: str) -> str:
        start = self.take(self.u64(what), what)
        try:
            return str(self.data[start : self.position], "utf-8")
        except UnicodeDecodeError as bad:
            raise self.damaged(f"{what} is not UTF-8 ({bad.reason})") from None

    def numbers(self, kind: int, count: int, what: str) -> list:
        dtype = np.dtype(NUMBERS[kind])
        start = self.take(count * dtype.itemsize, what)
        return np.frombuffer(self.data, dtype, count, start).tolist()

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        if kind in NUMBERS:
            return self.numbers(kind, 1, what)[0]
        if kind == STRING:
            return self.text(what)
        if kind == ARRAY:
            return self.array(what, depth + 1)
        raise self.damaged(f"{what} has the unknown value type {kind}")

    def array(self, what: str, depth: int) -> list:
        if depth > DEEPEST_ARRAY:
            raise self.damaged(f"{what} nests arrays deeper than {DEEPEST_ARRAY}")
        kind, count = self.u32(what), self.u64(what)
        if kind in NUMBERS:
            return self.numbers(kind, count, what)
        smallest = 8 if kind == STRING else 12
        if count * smallest > self.left:
            raise self.damaged(f"{what} claims {count} elements, the file has {self.left} bytes left")
        if kind == STRING:
            return self.texts(count, what)
        return [self.value(kind, what, depth) for _ in range(count)]

    def texts(self, count: int, what: str) -> list[str]:
        """`count` texts, as `text` reads them: vocabularies have a hundred thousand, so nothing is called for each."""
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
        return found + [self.text(what) for _ in range(count - len(found))]  # too short for them: it says so


def read_directory(path: Path) -> Directory:
    """Open and check a GGUF file."""
    cursor = Cursor(map_file(path), path)
    check_version(cursor)
    tensor_count, pair_count = cursor.u64("the tensor count"), cursor.u64("the metadata count")
    if pair_count * SHORTEST_PAIR + tensor_count * SHORTEST_RECORD > cursor.left:
        raise cursor.damaged(f"{pair_count} keys and {tensor_count} tensors cannot fit in {cursor.left} bytes")
    metadata = read_metadata(cursor, pair_count)
    raw = [read_record(cursor) for _ in range(tensor_count)]
    tensors = place(cursor, raw, alignment(cursor, metadata))
    return Directory(path, metadata, tensors, cursor.data)


def map_file(path: Path) -> mmap.mmap:
    try:
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelNotFound(f"{path}: no such file") from None
    except ValueError:  # what mmap says of an empty file
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


def read_metadata(cursor: Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.text("a metadata key")
        if key in metadata:
            raise cursor.damaged(f"the key {shown(key)} appears twice")
        metadata[key] = cursor.value(cursor.u32(f"the type of {shown(key)}"), f"the value of {shown(key)}")
    return metadata


def read_record(cursor: Cursor) -> TensorRecord:
    """A record whose offset still counts from the start of the data."""
    name = cursor.text("a tensor name")
    what = f"the tensor {shown(name)}"
    rank = cursor.u32(what)
    if not name or not 1 <= rank <= 4:
        raise cursor.damaged(f"{what} has {rank} dimensions, expected a named tensor with 1 to 4")
    dims = [cursor.u64(what) for _ in range(rank)]
    kind, offset = cursor.u32(what), cursor.u64(what)
    if not all(1 <= d <= LARGEST_DIMENSION for d in dims):
        raise cursor.damaged(f"{what} has dimensions {dims}, expected 1 to {LARGEST_DIMENSION}")
    if kind not in KINDS:
        raise UnsupportedModel(f"{cursor.path}: {what} has ggml type {kind}, which mlxrt does not know")
    label, block, width = KINDS[kind]
    if dims[0] % block:
        raise cursor.damaged(f"{what} has rows of {dims[0]}, not a multiple of {label}'s block of {block}")
    elements = 1
    for d in dims:
        elements *= d
    return TensorRecord(name, tuple(reversed(dims)), label, offset, elements // block * width)


def alignment(cursor: Cursor, metadata: dict[str, Any]) -> int:
    value = metadata.get("general.alignment", 32)  # the format's default
    if type(value) is not int or not 1 <= value <= 2**20 or value & (value - 1):
        raise cursor.damaged(f"general.alignment is {shown(value)}, expected a power of two")
    return value


def place(cursor: Cursor, raw: list[TensorRecord], step: int) -> dict[str, TensorRecord]:
    """Records by name with offsets from the start of the file; none outside it, none overlapping."""
    start = -(-cursor.position // step) * step
    tensors: dict[str, TensorRecord] = {}
    for r in raw:
        if r.name in tensors:
            raise cursor.damaged(f"the tensor {shown(r.name)} appears twice")
        if r.offset % step:
            raise cursor.damaged(f"the tensor {shown(r.name)} lies at {r.offset}, not a multiple of {step}")
        tensors[r.name] = TensorRecord(r.name, r.shape, r.kind, start + r.offset, r.nbytes)
    end, before = start, "the header"
    for r in sorted(tensors.values(), key=lambda r: r.offset):
        if r.offset < end:
            raise cursor.damaged(f"the tensors {shown(before)} and {shown(r.name)} overlap")
        end, before = r.offset + r.nbytes, r.name
    if end > len(cursor.data) and tensors:
        raise cursor.damaged(f"{shown(before)} ends at byte {end}, the file has {len(cursor.data)}: it is truncated")
    return tensors
