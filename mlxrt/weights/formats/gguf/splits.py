"""A model in one GGUF file, or in several that belong together: NAME-00001-of-00003.gguf and so on."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ....errors import BadCheckpoint, ModelNotFound, quote
from .reader import GGUFFile, GGUFTensor, read_gguf

SPLIT_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


def split_names(name: str) -> list[str]:
    """The names of all files of the set that a file of this name belongs to; the name alone if it is of none."""
    found = SPLIT_NAME.fullmatch(name)
    if not found or not 0 < int(found[2]) <= int(found[3]):
        return [name]
    return [f"{found[1]}-{i + 1:05}-of-{found[3]}.gguf" for i in range(int(found[3]))]


def first_split(paths: Iterable[Path]) -> Path | None:
    """The first of `paths` where they are one model's files."""
    paths = list(paths)
    names = {path.name for path in paths}
    fits = bool(paths) and set(split_names(paths[0].name)) == names
    return min(paths) if fits else None


@dataclass(frozen=True)
class GGUFSet:
    """The files of one model as if they were one file."""

    metadata: dict[str, Any]  # the first file's: others hold which part they are
    tensors: dict[str, GGUFTensor]
    files: tuple[GGUFFile, ...]
    holders: dict[str, GGUFFile]  # tensor -> the file that holds it

    def tensor_bytes(self, tensor: GGUFTensor) -> np.ndarray:
        """The stored bytes of a tensor, not copied."""
        return self.holders[tensor.name].tensor_bytes(tensor)

    def release_pages(self) -> None:
        for file in self.files:
            file.release_pages()


def read_gguf_set(path: Path) -> GGUFSet:
    """Open the file, and those of its set: any of them may be given."""
    given = read_gguf(path)
    count = given.metadata.get("split.count", 0)
    if count in (0, 1):
        return join_files([given])
    names = split_names(path.name)
    if type(count) is not int or len(names) != count:
        raise BadCheckpoint(
            f"{path} is one of {quote(count)} splits, so its name must end in -00001-of-{count:05}.gguf or the like"
            if type(count) is int
            else f"{path}: split.count is {quote(count)}, expected a whole number; download the file again"
        )
    if missing := [name for name in names if not path.with_name(name).is_file()]:
        raise ModelNotFound(f"{path} is one of {count} files of a model, but {missing[0]} is not beside it")
    files = [given if name == path.name else read_gguf(path.with_name(name)) for name in names]
    for i, file in enumerate(files):
        if (file.metadata.get("split.no"), file.metadata.get("split.count")) != (i, count):
            raise BadCheckpoint(f"{file.path} is not split {i} of {count} as its name says; download it again")
    return join_files(files)


def join_files(files: list[GGUFFile]) -> GGUFSet:
    tensors: dict[str, GGUFTensor] = {}
    holders: dict[str, GGUFFile] = {}
    for file in files:
        if twice := file.tensors.keys() & tensors.keys():
            raise BadCheckpoint(f"{file.path} holds {quote(min(twice))}, which another file of the model has too")
        tensors |= file.tensors
        holders |= dict.fromkeys(file.tensors, file)
    total = files[0].metadata.get("split.tensors.count", len(tensors))
    if len(files) > 1 and total != len(tensors):
        raise BadCheckpoint(f"{files[0].path} says {quote(total)} tensors in all, its files hold {len(tensors)}")
    return GGUFSet(files[0].metadata, tensors, tuple(files), holders)
