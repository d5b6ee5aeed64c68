"""Reads kernel sources: the files of kernels/metal, their includes put in and `#line` directives before each part.

A kernel is a .metal file: includes and functions first, then the kernel itself. MLX takes the two apart and writes the
signature, so the file says MLX_ARGUMENTS where it goes:

    #include "quantized.h"
    FN float helper(float x) { ... }
    [[kernel]] void mlxrt_name(MLX_ARGUMENTS) {
        ...
    }

A compiler's error names the file and the line, on Metal, CUDA and in the simulator.
"""

import re
from dataclasses import dataclass
from functools import cache
from importlib import resources

FOLDER = "mlxrt/kernels"  # as compilers name it
SHIMS = {"metal": "metal/shim.h", "cuda": "cuda/shim.h"}  # what all kernels use, spelled for each compiler
INCLUDE = re.compile(r'#include "(\w+\.h)"\s*(?://.*)?')
KERNEL = re.compile(r"^\[\[kernel\]\] void \w+\(MLX_ARGUMENTS\) \{\n(?P<body>.*?)^\}$", re.M | re.S)


@dataclass(frozen=True)
class KernelText:
    """`helpers` goes before the signature that MLX writes, `body` after it."""

    helpers: str
    body: str


def read(path: str) -> str:
    """A file of the package, by its path under kernels/."""
    return resources.files(__package__).joinpath(*path.split("/")).read_text(encoding="utf-8")


@cache
def shim(backend: str) -> str:
    return expand(read(SHIMS[backend]), SHIMS[backend], 1, set())


@cache
def load(file: str) -> KernelText:
    path = f"metal/{file}"
    text = read(path)
    found = KERNEL.search(text)
    if found is None:
        raise ValueError(f"{path} has no '[[kernel]] void name(MLX_ARGUMENTS) {{' with its closing brace in column 1")
    line = text.count("\n", 0, found.start("body")) + 1
    return KernelText(expand(text[: found.start()], path, 1, set()), expand(found["body"], path, line, set()))


def expand(text: str, path: str, first: int, seen: set[str]) -> str:
    """`text`, which begins at line `first` of `path`, with each file it includes put in once."""
    out = [f'#line {first} "{FOLDER}/{path}"']
    for number, line in enumerate(text.splitlines(), first):
        found = INCLUDE.fullmatch(line.strip())
        if found is None:
            out.append(line)
        elif found[1] not in seen:
            seen.add(found[1])
            out += [expand(read(f"metal/{found[1]}"), f"metal/{found[1]}", 1, seen).rstrip("\n")]
            out.append(f'#line {number + 1} "{FOLDER}/{path}"')
        else:
            out.append("")
    return "\n".join(out) + "\n"
