"""Address spaces, checked by clang: a syntax-only pass over a kernel text with real address_space attributes.

Optional: needs a clang++ in PATH (or $METAL_SIM_CLANG), or the libclang wheel. Compiles nothing that runs.
"""

import os
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

from .translate import FILE, MARKS, without_comments

DECLARATIONS = Path(__file__).resolve().parent / "spaces" / "metal_spaces.h"
FLAGS = """-x c++ -std=c++17 -nostdinc -nostdinc++ -Wno-everything -Werror=vla -Werror=vla-extension -fsigned-char
    -Xclang -cl-single-precision-constant -fno-exceptions -fno-rtti""".split()
INSTANTIATION = re.compile(r'\ntemplate \[\[host_name\("[^"]*"\)\]\] \[\[kernel\]\] decltype\(([^)]*)\) ')
VARIABLE = re.compile(r"\bthreadgroup\b(?=\s+(?:const\s+)?[\w:]+(?:\s*<[^;*&]*?>)?\s+\w+\s*(?:\[[^;]*)?;)")


def available() -> str:
    """Which clang there is: a program, `libclang`, or nothing."""
    for candidate in (os.environ.get("METAL_SIM_CLANG"), "clang++"):
        if candidate and shutil.which(candidate):
            return candidate
    return "libclang" if find_spec("clang") and find_spec("clang.cindex") else ""


def spaced(text: str) -> str:
    t = INSTANTIATION.sub(lambda m: f"\ntemplate decltype({m.group(1)}) ", without_comments(text))
    t = re.sub(r"#include <[^>]*>", "", MARKS.sub("", t))
    # A threadgroup variable becomes one that is made elsewhere, since a class has no constructor there; as a
    # qualifier the word is address space 3.
    t = re.sub(r"\bthreadgroup\b", "AS(3)", VARIABLE.sub("extern AS(3)", t))
    return f'#include "{DECLARATIONS}"\n#line 1 "{FILE}"\n{t}'


def complaints(text: str) -> list[str]:
    """What clang has against a kernel text's pointers."""
    which = available()
    if which == "libclang":
        return ask_libclang(spaced(text))
    done = subprocess.run([which, *FLAGS, "-fsyntax-only", "-"], input=spaced(text), capture_output=True, text=True)
    return [line for line in done.stderr.splitlines() if " error:" in line]


def ask_libclang(text: str) -> list[str]:
    from clang import cindex

    unit = cindex.Index.create().parse("kernel.cpp", args=FLAGS, unsaved_files=[("kernel.cpp", text)])
    wrong = [d for d in unit.diagnostics if d.severity >= cindex.Diagnostic.Error]
    return [f"{d.location.file}:{d.location.line}: error: {d.spelling}" for d in wrong]
