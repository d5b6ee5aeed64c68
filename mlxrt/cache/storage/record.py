"""One node of the prefix store as a file: its name, what is in it, and whether it is what its name says.

A key is a digest over the identity of the model, the key before it and the node's tokens: it names the whole text up to
its end. Knows files and arrays; which of them are wanted, and where they go, is the store's business.
"""

import hashlib
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ...errors import BadSnapshot, shown
from .. import LayerState
from .checksummed import read_sealed, write_sealed

KIND, FORMAT, SUFFIX = "prefix", "1", ".safetensors"
NAME = re.compile(rf"([0-9a-f]{{64}})-([0-9a-f]{{1,8}}){re.escape(SUFFIX)}")
Described = Mapping[str, int]


@dataclass(frozen=True)
class Address:
    """Where a node stands in a text."""

    key: str
    parent: str  # the key before it; "" for the first
    tokens: tuple[int, ...]
    index: int

    @property
    def end(self) -> int:
        return (self.index + 1) * len(self.tokens)


@dataclass(frozen=True)
class Record:
    described: Mapping[int, Described]  # by group
    arrays: dict[str, mx.array]  # "layer.3.0": one place of the first array of layer 3


def addresses(digest: str, tokens: Sequence[int], size: int) -> list[Address]:
    """The full nodes of a text, each named by all that comes before it too."""
    known, found, parent = tuple(tokens), [], ""
    for i in range(len(known) // size):
        own = known[i * size : (i + 1) * size]
        text = f"{digest}\n{parent}\n".encode() + struct.pack(f"<{size}q", *own)
        key = hashlib.sha256(text).hexdigest()
        found.append(Address(key, parent, own, i))
        parent = key
    return found


def file_name(key: str, groups: int) -> str:
    """`groups`: one bit for each group of layers the record has something of."""
    return f"{key}-{groups:x}{SUFFIX}"


def parse_name(name: str) -> tuple[str, int] | None:
    found = NAME.fullmatch(name)
    return (found[1], int(found[2], 16)) if found else None


def stated(at: Address, identity: Mapping[str, str]) -> dict[str, Any]:
    """What a header says of its record beside the groups it holds."""
    return {
        "kind": KIND,
        "format": FORMAT,
        "identity": dict(identity),
        "key": at.key,
        "parent": at.parent,
        "tokens": list(at.tokens),
        "index": at.index,
    }


def write_record(path: Path, at: Address, identity: Mapping[str, str], record: Record) -> None:
    """A record that is there already stays: it holds the same, and somebody may be reading it."""
    groups = {str(g): dict(told) for g, told in record.described.items()}
    write_sealed(path, stated(at, identity) | {"groups": groups}, record.arrays, replace=False)


def read_record(path: Path, at: Address, identity: Mapping[str, str], empty: Sequence[LayerState]) -> Record:
    """A record that is what it should be in every respect, else BadSnapshot; FileNotFoundError where it has gone."""
    sealed = read_sealed(path)
    header = sealed.header
    for field, value in stated(at, identity).items():
        if header.get(field) != value:
            raise BadSnapshot(f"{path}: its {field} is {shown(header.get(field))}, not {shown(value)}")
    return Record(described_groups(path, header.get("groups"), at, empty), sealed.arrays)


def described_groups(path: Path, told: Any, at: Address, empty: Sequence[LayerState]) -> dict[int, Described]:
    named = parse_name(path.name)
    groups = [g for g in range(len(empty)) if named and named[1] >> g & 1]
    if not isinstance(told, dict) or set(told) != {str(g) for g in groups}:
        raise BadSnapshot(f"{path}: it does not hold the groups {groups} that its name says")
    for g in groups:
        own = told[str(g)]
        if not isinstance(own, dict) or set(own) != set(empty[g].describe()):
            raise BadSnapshot(f"{path}: group {g} is described by {shown(own)}")
        if any(type(v) is not int or not 0 <= v <= at.end for v in own.values()):
            raise BadSnapshot(f"{path}: group {g} is described by {shown(own)}, beyond its {at.end} tokens")
    return {g: told[str(g)] for g in groups}
