"""Checksummed files: arrays and a JSON header in a safetensors file that carries the SHA-256 of all its own bytes.

Written atomically, and used only after every byte was compared with the digest. What header and arrays mean is up to
the caller.
"""

import contextlib
import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import mlx.core as mx

from ...errors import BadCheckpoint, BadSnapshot
from ...weights.formats.safetensors import read_metadata
from ...weights.json_object import parse_object
from ..files import atomic_write

DTYPES = {
    mx.bool_: "BOOL", mx.uint8: "U8", mx.int8: "I8", mx.uint16: "U16", mx.int16: "I16", mx.uint32: "U32",
    mx.int32: "I32", mx.uint64: "U64", mx.int64: "I64", mx.float16: "F16", mx.bfloat16: "BF16", mx.float32: "F32",
}  # fmt: skip
MAGIC = b'{"__metadata__":{"sha256":"'  # the digest comes first, so that its offset is fixed
DIGEST_OFFSET = 8 + len(MAGIC)
BLANK_DIGEST = b"0" * 64  # stands for the digest while it is computed
READ_BYTES = 1 << 22
Encoded = list[bytes | memoryview]


class CannotRead(BadSnapshot):
    """The file system refuses a file: nothing is known of what it holds."""


@dataclass(frozen=True)
class ChecksummedFile:
    digest: str
    header: dict[str, Any]
    arrays: dict[str, mx.array]


def write_checksummed(path: Path, header: dict[str, Any], arrays: dict[str, mx.array]) -> str:
    """Write the file and return its digest."""
    return write_encoded(path, encode_file(header, arrays))


def encode_file(header: dict[str, Any], arrays: dict[str, mx.array]) -> Encoded:
    """All bytes of the file, but for the digest: what needs MLX, and so the thread whose arrays they are."""
    return [encode_header(header, arrays), *(array_bytes(arrays[name]) for name in sorted(arrays))]


def write_encoded(path: Path, parts: Encoded, *, replace: bool = True) -> str:
    """Write the file and return its digest, on any thread. With `replace` off an existing file is left as it is."""
    digest = hashlib.sha256()
    with atomic_write(path, replace=replace) as file:
        for data in parts:
            digest.update(data)
            file.write(data)
        file.seek(DIGEST_OFFSET)
        file.write(digest.hexdigest().encode())
    return digest.hexdigest()


def encode_header(header: Mapping[str, Any], arrays: Mapping[str, mx.array]) -> bytes:
    """The bytes before the first array, with a blank digest."""
    metadata = {"sha256": BLANK_DIGEST.decode(), "mlxrt": json.dumps(header, sort_keys=True)}
    entries: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name in sorted(arrays):
        begin, end = end, end + arrays[name].nbytes
        shape = list(arrays[name].shape)
        entries[name] = {"dtype": DTYPES[arrays[name].dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def array_bytes(array: mx.array) -> memoryview:
    return memoryview(mx.contiguous(array).reshape(-1).view(mx.uint8))  # type: ignore[arg-type]


def read_checksummed(path: Path) -> ChecksummedFile:
    """Read and verify a file. Raises FileNotFoundError where there is none, BadSnapshot where it is damaged.

    The digest is computed from what was loaded, so that a file which changes meanwhile is refused too."""
    with open_file(path) as file, reading(path):
        expected, begun = begin_digest(path, file)
        header = read_own_header(path)
        length = struct.unpack("<Q", begun[:8])[0] + 8  # sound: the header was checked
        begun += file.read(max(length - len(begun), 0))
        arrays = load_arrays(path, file)
    digest = hashlib.sha256(begun)
    for name in sorted(arrays):
        digest.update(array_bytes(arrays[name]))
    check_digest(path, digest.hexdigest(), expected)
    return ChecksummedFile(expected, header, arrays)


def load_arrays(path: Path, file: IO[bytes]) -> dict[str, mx.array]:
    try:
        file.seek(0)
        loaded = mx.load(file, format="safetensors")  # type: ignore[arg-type]
        mx.eval(loaded)  # while the file is open: another process may remove it at any time
    except RuntimeError as error:
        raise BadSnapshot(f"{path} is damaged, or no state saved by mlxrt ({error}); it was not used") from None
    assert isinstance(loaded, dict)
    return loaded


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CannotRead(f"{path} cannot be read: {error.strerror or error}") from None


def read_verified_header(path: Path) -> tuple[str, dict[str, Any]]:
    """Digest and header of a file. All bytes are verified, the arrays are not kept."""
    with open_file(path) as file, reading(path):
        return verify(path, file)


def has_magic(path: Path) -> bool:
    """Whether a file begins as a checksummed file does; its bytes are not verified."""
    with open(path, "rb") as file:
        return file.read(DIGEST_OFFSET)[8:] == MAGIC


def open_file(path: Path) -> IO[bytes]:
    try:
        if path.exists() and not path.is_file():
            raise BadSnapshot(f"{path} is no file; a saved state is one")
        return open(path, "rb")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CannotRead(f"{path} cannot be read: {error.strerror}") from None


def verify(path: Path, file: IO[bytes]) -> tuple[str, dict[str, Any]]:
    """Compare all bytes with the digest in the file; returns digest and header."""
    expected, begun = begin_digest(path, file)
    digest = hashlib.sha256(begun)
    while data := file.read(READ_BYTES):
        digest.update(data)
    check_digest(path, digest.hexdigest(), expected)
    return expected, read_own_header(path)


def begin_digest(path: Path, file: IO[bytes]) -> tuple[str, bytes]:
    """The digest in the file, and the bytes up to its end as they count: with a blank digest."""
    head = file.read(DIGEST_OFFSET + len(BLANK_DIGEST))
    if head[8:DIGEST_OFFSET] != MAGIC:
        raise BadSnapshot(f"{path} is no state saved by mlxrt, or its beginning is damaged; it was not used")
    return head[DIGEST_OFFSET:].decode("ascii", "replace"), head[:DIGEST_OFFSET] + BLANK_DIGEST


def check_digest(path: Path, found: str, expected: str) -> None:
    if found != expected:
        raise BadSnapshot(f"{path} is damaged: its digest does not match; it was not used")


def read_own_header(path: Path) -> dict[str, Any]:
    """The JSON that was written with the arrays. Checks the file's header too: mx.load trusts what it reads."""
    try:
        return parse_object(read_metadata(path)["mlxrt"].encode())
    except BadCheckpoint as error:
        raise BadSnapshot(f"{path} is damaged, or no state saved by mlxrt ({error}); it was not used") from None
    except (KeyError, ValueError) as error:
        raise BadSnapshot(f"{path} is no state saved by mlxrt ({error})") from None
