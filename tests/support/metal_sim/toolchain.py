"""From C++ text to a loadable library: which compiler, which flags, where the results are kept.

Results lie in the user's cache folder under the hash of everything they depend on. Knows no Metal.
"""

import functools
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx

from mlxrt.weights.source.cache_dir import cache_root

from .findings import MetalCompileError, NoCompiler

HERE = Path(__file__).resolve().parent
SHIM, NATIVE = HERE / "shim", HERE / "native"
MLX_INCLUDE = Path(mx.__file__).resolve().parent / "include"
# The names Metal's own headers are asked for by; each holds everything.
HEADERS = """metal_array metal_atomic metal_common metal_compute metal_geometric metal_integer metal_limits
    metal_logging metal_math metal_numeric metal_pack metal_relational metal_simdgroup metal_simdgroup_matrix
    metal_stdlib metal_type_traits metal_types""".split()
PRELUDE = '#include <metal_math>\n#include "mlx/backend/metal/kernels/utils.h"\n'
FLAGS = """-std=c++20 -fPIC -w -ffp-contract=off -fno-exceptions -fno-strict-aliasing -fstack-clash-protection
    -ftrivial-auto-var-init=pattern -fsigned-char""".split()
CHECKS = """-O1 -g1 -fsanitize=thread
    -fsanitize=bounds,shift-exponent,integer-divide-by-zero,alignment,float-cast-overflow""".split()
# Found before any test runs: one that moves mlxrt's cache would move this one for the rest of its process, which then
# compiles every kernel again.
CACHE = cache_root() / "metal_sim"
MOST_BYTES = 2 << 30
SOURCES = "mlxrt/kernels/"  # how the `#line` directives of our kernels begin


@functools.cache
def compiler() -> tuple[str, ...]:
    """$METAL_SIM_CXX, else g++, else clang++."""
    if not sys.platform.startswith("linux"):
        raise NoCompiler("the Metal simulator runs on Linux; on a Mac the kernels run themselves")
    for candidate in (os.environ.get("METAL_SIM_CXX"), "g++", "clang++"):
        if candidate and shutil.which(candidate.split()[0]):
            return tuple(candidate.split())
    raise NoCompiler("the Metal simulator needs g++ or clang++; neither is in PATH")


def flags(checked: bool) -> list[str]:
    if "clang" in compiler()[0]:
        own = ["-Wno-user-defined-literals", "-Xclang", "-cl-single-precision-constant"]
    else:
        own = ["-fsingle-precision-constant"]
    return [*FLAGS, *own, *(CHECKS if checked else ["-O2"])]


def call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise MetalCompileError(done.stderr[:20000])
    return done.stdout


@functools.cache
def surroundings() -> str:
    """Everything a compiled kernel depends on besides its own text, as one hash."""
    files = [p for folder in (SHIM, NATIVE) for p in sorted(folder.rglob("*")) if p.is_file()]
    parts = [call(*compiler(), "--version"), mx.__version__, str(MLX_INCLUDE), *FLAGS, *CHECKS, PRELUDE]
    return digest(*parts, *(p.read_text(encoding="utf-8") for p in files))


def digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


@functools.cache
def cache_folder() -> Path:
    CACHE.mkdir(parents=True, exist_ok=True)
    trim(CACHE)
    return CACHE


def trim(folder: Path) -> None:
    """Forget what was used longest ago, once too much has gathered."""
    kept = sorted(((p.stat().st_mtime, p.stat().st_size, p) for p in folder.glob("*.so")), reverse=True)
    total = 0
    for _, size, path in kept:
        total += size
        if total > MOST_BYTES:
            path.unlink(missing_ok=True)


@functools.cache
def headers() -> Path:
    """A folder with the forwarding headers and the precompiled prelude of both modes."""
    folder = cache_folder() / f"headers-{surroundings()}"
    if (folder / "ready").exists():
        return folder
    making = folder.with_name(f"{folder.name}-{os.getpid()}")
    for mode in (True, False):
        (making / prelude_name(mode)).parent.mkdir(parents=True, exist_ok=True)
        (making / prelude_name(mode)).write_text(PRELUDE)
    for name in HEADERS:
        (making / name).write_text('#include "metal_sim.hpp"\n')
    for mode in (True, False):
        source = making / prelude_name(mode)
        call(
            *compiler(),
            *flags(mode),
            *includes(making),
            "-x",
            "c++-header",
            str(source),
            "-o",
            f"{source}.{PRECOMPILED}",
        )
    (making / "ready").touch()
    try:
        making.rename(folder)
    except OSError:  # another process was faster; the two are equal
        shutil.rmtree(making)
    return folder


PRECOMPILED = "gch"  # clang++ finds this name beside the header as well


def prelude_name(checked: bool) -> str:
    return f"{'checked' if checked else 'plain'}/prelude.hpp"


def includes(folder: Path) -> list[str]:
    return [part for place in (SHIM, folder, MLX_INCLUDE) for part in ("-I", str(place))]


@functools.cache
def runtime_library() -> Path:
    library = cache_folder() / f"runtime-{surroundings()}.so"
    if not library.exists():
        making = library.with_suffix(f".{os.getpid()}")
        call(*compiler(), "-O2", "-std=c++17", "-fPIC", "-shared", "-o", str(making), str(NATIVE / "runtime.cpp"))
        os.replace(making, library)
    return library


def preprocess(text: str) -> str:
    """A text that includes MLX's own headers, with them inside and threadgroup declarations still to be found."""
    source = headers() / f"include-{os.getpid()}.cpp"
    source.write_text(PRELUDE + text)
    try:
        return call(*compiler(), "-E", "-DMSIM_KEEP_THREADGROUP", *flags(False), *includes(headers()), str(source))
    finally:
        source.unlink()


def build(text: str, checked: bool, whole: bool, folder: Path | None = None) -> Path:
    """The library of a C++ text, from the cache where it lies already. `whole`: the text brings the prelude itself."""
    folder = folder or cache_folder()
    library = folder / f"{digest(text, surroundings(), str(checked))}.so"
    if library.exists():
        os.utime(library)
        return library
    making = library.with_suffix(f".{os.getpid()}")
    source = making.with_suffix(f"{making.suffix}.cpp")
    source.write_text(text)
    before = [] if whole else ["-include", str(headers() / prelude_name(checked))]
    object_file = source.with_suffix(".o")
    try:
        call(*compiler(), *flags(checked), *includes(headers()), *before, "-c", "-o", str(object_file), str(source))
        call(*linker(), "-o", str(making), str(object_file), *system_libraries())
    finally:
        source.unlink()
        object_file.unlink(missing_ok=True)
    os.replace(making, library)
    return library


@functools.cache
def linker() -> tuple[str, ...]:
    """The compiler's own, asked directly: as a driver the compiler starts three programs and reads libstdc++, six times
    the work for a kernel. Nothing brings a sanitizer's library in."""
    return call(*compiler(), "-print-prog-name=ld").strip(), "-shared"


@functools.cache
def system_libraries() -> list[str]:
    """With the compiler's own functions: on ARM atomics are calls of those."""
    asked = ("-print-libgcc-file-name", "-print-file-name=libm.so.6", "-print-file-name=libc.so.6")
    return [found for option in asked if os.path.exists(found := call(*compiler(), option).strip())]


def source_line(library: Path, offset: int, file: str) -> str:
    """The innermost line of a kernel that an address comes from; empty when it cannot be told. `file`: what a kernel
    without `#line` directives is called."""
    tool = shutil.which("addr2line")
    if not tool or not offset:
        return ""
    places = subprocess.run([tool, "-i", "-e", str(library), hex(offset)], capture_output=True, text=True).stdout
    return next((os.path.basename(p).split(" ")[0] for p in places.splitlines() if f"{file}:" in p or SOURCES in p), "")
