"""Record: one node of the prefix cache as a file.

Its key is a chained digest over the model's identity, the parent's key and the node's tokens, so it names all text up
to the node's end. Handles files and arrays; where the arrays go is up to the disk store.
"""

import hashlib
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ...errors import BadSnapshot, quote
from ...weights.identity import differing_field
from .. import LayerState
from .checksummed import Encoded, encode_file, read_checksummed

KIND, FORMAT, SUFFIX = "prefix", "1", ".safetensors"
FILE_NAME = re.compile(rf"([0-9a-f]{{64}})-([0-9a-f]{{1,8}}){re.escape(SUFFIX)}")
Metadata = Mapping[str, int]


@dataclass(frozen=True)
class NodeKey:
    """A full node of a text, by its chained digest."""

    digest: str
    parent: str  # the digest before it; "" for the first
    tokens: tuple[int, ...]
    index: int

    @property
    def end(self) -> int:
        return (self.index + 1) * len(self.tokens)


@dataclass(frozen=True)
class Record:
    metadata: Mapping[int, Metadata]  # by group: what `LayerState.restore` needs beside the blocks
    arrays: dict[str, mx.array]  # "layer.3.0": one block of the first array of layer 3


def node_keys(identity_digest: str, tokens: Sequence[int], size: int, salt: str = "") -> list[NodeKey]:
    """The keys of all full nodes of `size` tokens in a text. With a salt they are nobody else's keys."""
    text, keys, parent = tuple(tokens), [], hashlib.sha256(salt.encode()).hexdigest() if salt else ""
    for i in range(len(text) // size):
        own = text[i * size : (i + 1) * size]
        hashed = f"{identity_digest}\n{parent}\n".encode() + struct.pack(f"<{size}q", *own)
        digest = hashlib.sha256(hashed).hexdigest()
        keys.append(NodeKey(digest, parent, own, i))
        parent = digest
    return keys


def file_name(digest: str, groups: int) -> str:
    """`groups`: a bit mask of the layer groups in the record."""
    return f"{digest}-{groups:x}{SUFFIX}"


def parse_name(name: str) -> tuple[str, int] | None:
    match = FILE_NAME.fullmatch(name)
    return (match[1], int(match[2], 16)) if match else None


def header_fields(key: NodeKey, identity: Mapping[str, str]) -> dict[str, Any]:
    """All of a record's header but the groups."""
    return {
        "kind": KIND,
        "format": FORMAT,
        "identity": dict(identity),
        "key": key.digest,
        "parent": key.parent,
        "tokens": list(key.tokens),
        "index": key.index,
    }


def encode_record(key: NodeKey, identity: Mapping[str, str], record: Record) -> Encoded:
    """The bytes of a record, for `write_encoded`. An existing one should stay: it holds the same, and another process
    may be reading it."""
    groups = {str(g): dict(metadata) for g, metadata in record.metadata.items()}
    return encode_file(header_fields(key, identity) | {"groups": groups}, record.arrays)


def read_record(path: Path, key: NodeKey, identity: Mapping[str, str], empty: Sequence[LayerState]) -> Record:
    """Read and check a record: BadSnapshot where anything differs, FileNotFoundError where it is gone."""
    file = read_checksummed(path)
    saved = file.header.get("identity")
    if not isinstance(saved, dict) or differing_field(saved, identity):
        raise BadSnapshot(f"{path}: its identity is {quote(saved)}, not {quote(identity)}")
    for field, value in header_fields(key, saved).items():
        if file.header.get(field) != value:
            raise BadSnapshot(f"{path}: its {field} is {quote(file.header.get(field))}, not {quote(value)}")
    return Record(check_groups(path, file.header.get("groups"), key, empty), file.arrays)


def check_groups(path: Path, raw: Any, key: NodeKey, empty: Sequence[LayerState]) -> dict[int, Metadata]:
    name = parse_name(path.name)
    groups = [g for g in range(len(empty)) if name and name[1] >> g & 1]
    if not isinstance(raw, dict) or set(raw) != {str(g) for g in groups}:
        raise BadSnapshot(f"{path}: it does not hold the groups {groups} that its name says")
    for g in groups:
        own = raw[str(g)]
        if not isinstance(own, dict) or set(own) != set(empty[g].describe()):
            raise BadSnapshot(f"{path}: group {g} is described by {quote(own)}")
        if any(type(v) is not int or not 0 <= v <= key.end for v in own.values()):
            raise BadSnapshot(f"{path}: group {g} is described by {quote(own)}, beyond its {key.end} tokens")
    return {g: raw[str(g)] for g in groups}
