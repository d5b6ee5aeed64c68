"""Compiles the CPU kernels once for a machine, and checks them before anything uses them.

A `cc` of the system serves, or PyPI's `ziglang`, a compiler that pip can install; without either MLX computes.
The library lies beside the sources as byte code does, or in the cache folder where that cannot be written. Its name holds
a digest of the sources and of the processor: a folder that moved to another machine is compiled again. A process of
its own runs the check, so that a library that crashes is never opened by the caller.
"""

import contextlib
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

log = logging.getLogger("mlxrt")

SOURCES = Path(__file__).parent
FLAGS = ("-std=gnu11", "-shared", "-fPIC", "-ffp-contract=off", "-fno-math-errno")
LIBRARIES = ("-lm", "-lpthread")
VARIANTS = {"float32": (), "int8": ("-DDIGITS=1",)}  # by what activations of products are, see dot.h
TIMEOUT = 300.0  # seconds for a compiler on a busy machine


class BuildError(Exception):
    """Why there is no library; one line."""


def find_compilers() -> Iterator[tuple[str, ...]]:
    """Commands that compile C, best first."""
    if find_spec("ziglang") is not None:
        yield (sys.executable, "-m", "ziglang", "cc", "-O2")
    for name in ("clang", "gcc", "cc"):
        if (path := shutil.which(name)) is not None:
            yield (path, "-O2" if name == "clang" else "-O3")


def describe_processor() -> str:
    """What compiled code depends on: the instructions there are."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(
        sorted({line for line in lines if line.startswith(("flags", "Features", "CPU part", "model name"))})
    )


def multiplies_bytes() -> bool:
    """Whether the processor has dot products of bytes that the kernels use for every format: vector.h chooses alike."""
    if platform.machine() == "aarch64":
        return True
    try:
        return "avx512_vnni" in describe_processor()
    except OSError:  # not Linux
        return False


def can_round_activations() -> bool:
    """Whether there are products of activations of 8 bits for such a processor; of one without dot products of bytes the
    library says that it does not round."""
    return platform.machine() == "aarch64"


def library_name(activations: str = "float32") -> str:
    """Of this processor, these sources and this way of compiling them."""
    files = sorted(path for pattern in ("*.c", "*.h") for path in SOURCES.glob(pattern))
    parts = [platform.machine(), describe_processor(), *FLAGS, *VARIANTS[activations]]
    parts += [path.read_text(encoding="utf-8") for path in files]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return f"mlxrt-cpu-{digest[:20]}.so"


def find_library(cache: Path, activations: str = "float32") -> Path:
    """The compiled library, from where it was put before or compiled now; BuildError with the reason if there is none."""
    if not sys.platform.startswith("linux"):
        raise BuildError(f"they are made for Linux, not for {sys.platform}")
    try:
        name = library_name(activations)
    except OSError as error:
        raise BuildError(f"{error.filename}: {error.strerror}") from None
    folders = (SOURCES / "__pycache__", cache)
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    for folder in folders:
        if is_writable(folder):
            return build(folder / name, activations)
    raise BuildError(f"neither {folders[0]} nor {cache} can be written")


def is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def build(path: Path, activations: str = "float32") -> Path:
    """Compile with the first compiler whose library passes the check, then give it its name."""
    reasons = []
    for command in find_compilers():
        log.info(f"compiling the CPU kernels for this machine, once ({path.parent})")
        handle, partial = tempfile.mkstemp(suffix=".so.partial", dir=path.parent)
        os.close(handle)
        try:
            compile_to((*command, *VARIANTS[activations]), Path(partial))
            check(Path(partial))
            os.replace(partial, path)
            return path
        except BuildError as error:
            reasons.append(f"{Path(command[0]).name if len(command) < 4 else 'ziglang'}: {error}")
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(partial)
    raise BuildError("; ".join(reasons) or "no C compiler was found; pip install ziglang brings one")


def compile_to(command: tuple[str, ...], path: Path) -> None:
    native = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
    sources = [str(source) for source in sorted(SOURCES.glob("*.c"))]
    run((*command, native, *FLAGS, *sources, "-o", str(path), *LIBRARIES), "it does not compile them")


def check(path: Path) -> None:
    """Compare the library with numpy, in a process of its own."""
    run((sys.executable, str(SOURCES / "check.py"), str(path)), "its library is wrong")


def run(command: tuple[str, ...], problem: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{problem}: {error}") from None
    if done.returncode:
        last = next(reversed(done.stderr.strip().splitlines()), f"exit {done.returncode}")
        raise BuildError(f"{problem}: {last[:200]}")
