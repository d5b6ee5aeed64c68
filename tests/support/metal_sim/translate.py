"""Kernel text to C++ for the shim headers: attributes away, threadgroup variables into checked memory, an entry point.

Works on the text; calls no compiler.
"""

import re
from collections import Counter

from .text import ATTRIBUTES, KernelText

FILE = "kernel.metal"  # what the compiler and the findings call the text
ENTRYPOINT = "msim_entry"
OWN_HEADER = re.compile(r"#include <metal_\w+>")  # all of Metal is there already
MARKS = re.compile(r"\[\[(?:kernel|buffer\(\d+\)|threadgroup\(\d+\)|" + "|".join(ATTRIBUTES) + r")\]\]")
INSTANTIATION = re.compile(r'\ntemplate \[\[host_name\("[^"]*"\)\]\][^;]*;\n')
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
# `threadgroup T name[..], other[..];`: a declaration, since nothing but type, names and sizes stands before the ;
DECLARATION = re.compile(r"\bthreadgroup\b(?P<what>(?:[^;*&(){}=\[\]]|\[[^\]]*\])*);")
POINTER = re.compile(r"\bthreadgroup\b(?=[^;,(){}=]*[*&])")  # a pointer or reference into threadgroup memory
HEAD = re.compile(
    r"\s*(?P<type>(?:const\s+|volatile\s+)?[A-Za-z_][\w:]*(?:\s*<(?:[^<>]|<[^<>]*>)*>)?)\s+(?P<names>.*)$", re.S
)
NAME = re.compile(r"\s*([A-Za-z_]\w*)\s*((?:\[.*\])?)\s*$", re.S)


def without_comments(text: str) -> str:
    """Line numbers stay."""
    return COMMENT.sub(lambda m: "\n" * m.group().count("\n") or " ", text)


def without_marks(text: str) -> str:
    return MARKS.sub("", INSTANTIATION.sub("\n", text))


def to_cpp(kernel: KernelText) -> str:
    body = threadgroup_variables(without_comments(OWN_HEADER.sub("", without_marks(kernel.text))))
    return f'#line 1 "{FILE}"\n{body}\n#line 1 "entry"\n{entrypoint(kernel)}'


def entrypoint(kernel: KernelText) -> str:
    given = []
    for i, a in enumerate(kernel.arguments):
        const = "" if a.role == "out" else "const "
        pointer = f"({const}{a.type[:-1]}*)b[{i}]"
        given.append("*" + pointer if a.type.endswith("&") else pointer)
    for a in kernel.attributes:
        given.append(f"uint3(t->{a}[0], t->{a}[1], t->{a}[2])" if ATTRIBUTES[a] == "uint3" else f"t->{a}")
    call = f"{kernel.name}{kernel.instance}({', '.join(given)});"
    return f'extern "C" void {ENTRYPOINT}(void** b, const msim_attrs* t) {{ {call} }}\n'


def threadgroup_variables(text: str) -> str:
    """Each declaration becomes a reference into memory the runtime gives out; other uses of the word mean nothing."""
    count: Counter[str] = Counter()

    def declare(found: re.Match[str]) -> str:
        what = re.sub(r"\n#[^\n]*", "\n", found["what"])
        head = HEAD.match(what)
        if not head:
            raise ValueError(f"{found.group()!r}: not a declaration the simulator understands")
        lines = [declared(head["type"], one, count) for one in re.split(r",(?![^\[]*\])", head["names"])]
        return " ".join(lines) + "\n" * found.group().count("\n")

    done = POINTER.sub("", DECLARATION.sub(declare, text))
    if left := re.search(r"\bthreadgroup\b[^\n]*", done):
        raise ValueError(f"{left.group()!r}: neither a threadgroup variable nor a pointer the simulator understands")
    return done


def declared(kind: str, one: str, count: Counter[str]) -> str:
    found = NAME.match(one)
    if not found:
        raise ValueError(f"threadgroup {kind} {one}: not a declaration this simulator understands")
    name, sizes = found.groups()
    count[name] += 1
    label = name if count[name] == 1 else f"{name} ({count[name]})"
    place = f'msim_threadgroup_memory("{label}", sizeof({name}_shared), sizeof({kind}))'
    return f"using {name}_shared = {kind}{sizes}; {name}_shared& {name} = *reinterpret_cast<{name}_shared*>({place});"
