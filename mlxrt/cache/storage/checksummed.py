"""Arrays and a JSON header in one file that carries the digest of all its own bytes.

Any tool reads it as safetensors. It appears whole under its name or not at all, and is read only after every byte was
compared with the digest. What header and arrays mean is the business of whoever wrote them.
"""

import contextlib
import hashlib
import json
import os
import struct
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import mlx.core as mx

from ...errors import BadCheckpoint, BadSnapshot
from ...weights.formats.json_text import parse_object
from ...weights.formats.safetensors import read_entries, read_header

DTYPES = {
    mx.bool_: "BOOL", mx.uint8: "U8", mx.int8: "I8", mx.uint16: "U16", mx.int16: "I16", mx.uint32: "U32",
    mx.int32: "I32", mx.uint64: "U64", mx.int64: "I64", mx.float16: "F16", mx.bfloat16: "BF16", mx.float32: "F32",
}  # fmt: skip
OPENING = b'{"__metadata__":{"sha256":"'  # the digest comes first, so that its place in the file is known
BLANK = b"0" * 64  # what stands in its place while the digest is computed
AT = 8 + len(OPENING)
PARTIAL = ".mlxrt-partial-"
ABANDONED = 600  # seconds after which a file that is being written has no writer any more
CHUNK = 1 << 22


@dataclass(frozen=True)
class Sealed:
    digest: str
    header: dict[str, Any]
    arrays: dict[str, mx.array]


def write_sealed(path: Path, header: Mapping[str, Any], arrays: Mapping[str, mx.array], *, replace: bool = True) -> str:
    """The digest of the file. With `replace` off a file that is there already stays as it is."""
    head = encode_header(header, arrays)
    digest = hashlib.sha256(head)
    with landing(path, replace) as file:
        file.write(head)
        for name in sorted(arrays):
            data = content(arrays[name])
            digest.update(data)
            file.write(data)
        file.seek(AT)
        file.write(digest.hexdigest().encode())
    return digest.hexdigest()


def encode_header(header: Mapping[str, Any], arrays: Mapping[str, mx.array]) -> bytes:
    """The file up to its first array, the digest left blank."""
    metadata = {"sha256": BLANK.decode(), "mlxrt": json.dumps(header, sort_keys=True)}
    entries: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name in sorted(arrays):
        begin, end = end, end + arrays[name].nbytes
        shape = list(arrays[name].shape)
        entries[name] = {"dtype": DTYPES[arrays[name].dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def content(array: mx.array) -> memoryview:
    return memoryview(mx.contiguous(array).reshape(-1).view(mx.uint8))  # type: ignore[arg-type]


@contextlib.contextmanager
def landing(path: Path, replace: bool = True) -> Iterator[IO[bytes]]:
    """A file written beside `path` that gets this name when it is complete. Only its owner may read: it quotes."""
    handle, name = tempfile.mkstemp(prefix=PARTIAL, dir=path.parent)
    try:
        with open(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if replace or not linked(name, path):
            os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


def linked(name: str, path: Path) -> bool:
    """Give a file a second name unless somebody has it; False where the file system knows no such thing."""
    try:
        os.link(name, path)
    except FileExistsError:
        return True
    except OSError:
        return path.exists()
    return True


def sweep(folder: Path) -> None:
    """Remove what killed writers left half-written."""
    for left in folder.glob(PARTIAL + "*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - left.stat().st_mtime > ABANDONED:
                left.unlink()


def read_sealed(path: Path) -> Sealed:
    """The whole file, verified. FileNotFoundError where there is none, BadSnapshot where it is not what was written."""
    with open_regular(path) as file:
        digest, header = verified(path, file)
        file.seek(0)
        loaded = mx.load(file, format="safetensors")  # type: ignore[arg-type]
        assert isinstance(loaded, dict)
        mx.eval(loaded)  # while the file is open: it may lose its name at any time
    return Sealed(digest, header, loaded)


def inspect_sealed(path: Path) -> tuple[str, dict[str, Any]]:
    """Digest and header of a file, all of it verified, its arrays not kept."""
    with open_regular(path) as file:
        return verified(path, file)


def open_regular(path: Path) -> IO[bytes]:
    if path.exists() and not path.is_file():
        raise BadSnapshot(f"{path} is no file; a saved state is one")
    try:
        return open(path, "rb")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise BadSnapshot(f"{path} cannot be read: {error.strerror}") from None


def verified(path: Path, file: IO[bytes]) -> tuple[str, dict[str, Any]]:
    head = file.read(AT + len(BLANK))
    if head[8:AT] != OPENING:
        raise BadSnapshot(f"{path} is no state saved by mlxrt, or its beginning is damaged; it was not used")
    claimed = head[AT:].decode("ascii", "replace")
    digest = hashlib.sha256(head[:AT] + BLANK)
    while piece := file.read(CHUNK):
        digest.update(piece)
    if digest.hexdigest() != claimed:
        raise BadSnapshot(f"{path} is damaged: its digest does not match; it was not used")
    try:
        read_header(path)  # mx.load trusts what it reads
        metadata = read_entries(path)[0]["__metadata__"]
        return claimed, parse_object(metadata["mlxrt"].encode())
    except (BadCheckpoint, KeyError, ValueError) as error:
        raise BadSnapshot(f"{path} is no state saved by mlxrt ({error})") from None
