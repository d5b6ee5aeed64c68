"""Rules on the words of a kernel: what a C++ compiler lets through and Apple's compiler, or CUDA's, does not.

Reads text; knows no types (see spaces.py for those).
"""

import re

from .translate import without_comments

SPACE = re.compile(r"\b(device|constant|threadgroup|thread)\b")
NOT_IN_METAL = re.compile(
    r"\b(?:goto|new|delete|throw|try|catch|virtual|dynamic_cast|typeid|thread_local|register|double|long\s+long|asm)\b"
)
NO_LIBRARY = re.compile(r"\b(?:std::\w+|printf|assert|malloc|memcpy|memset)\b")
CAST = re.compile(r"\(\s*(?:const\s+)?[A-Za-z_][\w:<>, ]*\*+\s*\)")
LAMBDA = re.compile(r"(?<![\w\])])\[[&=]?\]\s*\(")
# Metal reads 1.0 as a float, CUDA as a double
DOUBLE_LITERAL = re.compile(r"(?<![\w.])(?:\d+\.\d*|\.\d+|\d+(?=e[-+]?\d))(?:e[-+]?\d+)?(?![\w.])", re.I)
FUNCTION = re.compile(r"\b(?P<name>\w+)\s*\((?P<parameters>[^(){};]*)\)\s*\{")
NO_FUNCTIONS = ("if", "for", "while", "switch")


def lint(header: str, source: str) -> list[str]:
    header, source = without_comments(header), without_comments(source)
    both = header + "\n" + source
    found = [f"not available in Metal: {m.group()!r}" for m in NOT_IN_METAL.finditer(both)]
    found += [f"no C or C++ standard library in Metal: {m.group()!r}" for m in NO_LIBRARY.finditer(both)]
    found += [f"lambda, which Metal may refuse: {m.group()!r}" for m in LAMBDA.finditer(both)]
    found += [f"a double in CUDA: {m.group()!r}; write it with f" for m in DOUBLE_LITERAL.finditer(both)]
    casts = [m.group() for m in CAST.finditer(both)]
    found += [f"pointer cast without an address space: {cast!r}" for cast in casts if not SPACE.search(cast)]
    found += bare_parameters(both)
    found += [f"threadgroup variable outside the kernel body: {name!r}" for name in threadgroup_variables(header)]
    return found


def bare_parameters(text: str) -> list[str]:
    found = []
    for m in FUNCTION.finditer(text):
        if m["name"] in NO_FUNCTIONS:
            continue
        for one in (p.strip() for p in re.sub(r"<[^<>]*>", "", m["parameters"]).split(",")):
            if re.search(r"[\w>]\s*[*&]+\s*\w+$", one) and not SPACE.search(one):
                found.append(f"parameter without an address space: {one!r}")
    return found


def threadgroup_variables(header: str) -> list[str]:
    return re.findall(r"\bthreadgroup\s+(?:const\s+)?[\w:<>]+\s+(\w+)\s*(?:\[[^;]*\])?\s*;", header)
