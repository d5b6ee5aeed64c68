"""Kernels for CUDA, compiled once per machine and kept in a folder.

MLX compiles a custom CUDA kernel anew in every process, and with all of its own headers: 2.5 s each, a minute or two for
a model. It runs compiled ones just as well. The compiler is the one MLX itself uses, from the same wheels.
"""

import ctypes
import hashlib
import importlib.util
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import get_ident
from typing import Any

import mlx.core as mx

from ...cache.files import atomic_write
from .module_cache import put_module, use_module_folder

log = logging.getLogger("mlxrt")

TYPES = {
    mx.bfloat16: "__nv_bfloat16", mx.float16: "__half", mx.float32: "float", mx.uint32: "unsigned int",
    mx.int32: "int", mx.uint8: "unsigned char", mx.int8: "signed char", mx.uint16: "unsigned short",
    mx.int16: "short", mx.int64: "long long", mx.bool_: "bool",
}  # fmt: skip
INCLUDES = "#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n"
# Where a kernel may be placed before the one ahead of it has ended (graph.py), it waits for that one; elsewhere this is
# nothing. Devices before Hopper have no such instruction.
FIRST_WAITING = 90
WAIT = f"""#if __CUDA_ARCH__ >= {10 * FIRST_WAITING}
asm volatile("griddepcontrol.wait;" ::: "memory");
#endif"""
NO_NVRTC = "NVIDIA's compiler is not here: pip install nvidia-cuda-nvrtc nvidia-cuda-runtime"
Nvrtc = tuple[ctypes.CDLL, Path]  # the compiler, and the folder of CUDA's headers


@cache
def find_nvrtc() -> Nvrtc | None:
    """NVIDIA's run-time compiler: from its wheels, else from an installed toolkit; None where there is neither."""
    found = importlib.util.find_spec("nvidia")
    roots = [Path(folder) for folder in (found.submodule_search_locations or () if found else ())]
    roots += [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    for root in [*roots, Path("/usr/local/cuda")]:
        libraries = [p for p in sorted(root.rglob("libnvrtc.so*")) if "builtins" not in p.name and "alt" not in p.name]
        headers = next(root.rglob("cuda_fp16.h"), None)
        if libraries and headers:
            try:
                return ctypes.CDLL(str(libraries[-1])), headers.parent
            except OSError:  # of another system: look on
                continue
    return None


def cuda_source(
    name: str,
    inputs: Sequence[tuple[str, mx.Dtype]],
    outputs: Sequence[tuple[str, mx.Dtype]],
    source: str,
    header: str,
    template: Sequence[tuple[str, Any]],
    threads: int,
) -> str:
    """A whole file: what MLX would make of the same definition, as far as our kernels can tell.

    The compiler is also told how many threads a threadgroup has, and how many threadgroups shall run on a
    multiprocessor at once where the template says RESIDENT: a thread has that many registers, and no more.
    """
    constants = [
        f"using {key} = {TYPES[value]};"
        if isinstance(value, mx.Dtype)
        else f"constexpr {'bool' if isinstance(value, bool) else 'int'} {key} = {str(value).lower()};"
        for key, value in template
    ]
    takes = [f"const {TYPES[dtype]}* {n}" for n, dtype in inputs] + [f"{TYPES[dtype]}* {n}" for n, dtype in outputs]
    body = "\n".join([*constants, WAIT, source])
    bounds = f"__launch_bounds__({threads}, {dict(template).get('RESIDENT', 1)})"
    return f'{INCLUDES}{header}\nextern "C" __global__ void {bounds} {name}({", ".join(takes)}) {{\n{body}\n}}\n'


def compile_cubin(text: str, architecture: str) -> bytes:
    """Machine code for such a device; RuntimeError with what the compiler said against the text."""
    there = find_nvrtc()
    if there is None:
        raise RuntimeError(NO_NVRTC)
    nvrtc, headers = there
    program = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None)
    try:
        said = (f"--gpu-architecture={architecture}", f"-I{headers}", "--std=c++17", "-default-device")
        options = (ctypes.c_char_p * len(said))(*(option.encode() for option in said))
        if nvrtc.nvrtcCompileProgram(program, len(said), options):
            raise RuntimeError(read_output(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).decode())
        return read_output(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def read_output(size_of: Any, read: Any, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    size_of(program, ctypes.byref(size))
    out = ctypes.create_string_buffer(size.value)
    read(program, out)
    return out.raw.rstrip(b"\0") if size_of.__name__.endswith("LogSize") else out.raw


@dataclass(frozen=True)
class Launch:
    """A kernel and all it was given: enough to launch it again without MLX (cuda_graph.py)."""

    name: str
    code: bytes
    inputs: list[mx.array]
    outputs: list[mx.array]
    blocks: tuple[int, ...]
    threads: tuple[int, ...]


class Library:
    """Compiled kernels in a folder, by their text. Stands where mx.fast.cuda_kernel would.

    `modules`: MLX's own folder of compiled modules, where it finds them by name.
    """

    def __init__(
        self, folder: Path, architecture: str, run: Callable[..., Any] | None = None, modules: Path | None = None
    ):
        self.folder, self.architecture, self._keeps = folder / architecture, architecture, True
        self.run, self.modules = run or mx.fast.precompiled_cuda_kernel, modules
        self._ready: dict[str, tuple[str, bytes]] = {}  # by text: the kernel's name and its code
        self._record: tuple[int, list[Launch]] | None = None  # for whom: other threads launch for other engines

    @property
    def waits(self) -> bool:
        """Whether its kernels wait for the one ahead of them."""
        number = re.match(r"sm_(\d+)", self.architecture)
        return number is not None and int(number[1]) >= FIRST_WAITING

    @contextmanager
    def recording(self) -> Iterator[list[Launch]]:
        """Whatever this thread launches meanwhile, in a list."""
        launches: list[Launch] = []
        self._record = get_ident(), launches
        try:
            yield launches
        finally:
            self._record = None

    def __call__(
        self, name: str, input_names: Sequence[str], output_names: Sequence[str], source: str, header: str = ""
    ) -> Callable[..., list[mx.array]]:
        known: dict[Any, tuple[str, bytes, bytes]] = {}  # to make a text takes longer than to launch it

        def launch(*, inputs, grid, threadgroup, output_shapes, output_dtypes, template=()) -> list[mx.array]:
            kinds = tuple(a.dtype for a in inputs)
            key = (threadgroup[0], kinds, tuple(output_dtypes), *((k, type(v), v) for k, v in template))
            if key not in known:
                takes, gives = zip(input_names, kinds, strict=True), zip(output_names, output_dtypes, strict=True)
                text = cuda_source("NAME", list(takes), list(gives), source, header, list(template), threadgroup[0])
                own, code = self.find(text, name)
                known[key] = own, code, self.launch_code(own, code)
            own, code, given = known[key]
            made = self.run(
                name=own,
                compiled_source=given,
                inputs=inputs,
                output_shapes=output_shapes,
                output_dtypes=output_dtypes,
                scalars=[],
                grid=grid,
                threadgroup=threadgroup,
                ensure_row_contiguous=True,
            )
            blocks = tuple(-(-n // size) for n, size in zip(grid, threadgroup))
            self.record(Launch(own, code, list(inputs), list(made), blocks, tuple(threadgroup)))
            return made

        return launch

    def launch_code(self, name: str, code: bytes) -> bytes:
        """What MLX is given to launch a kernel: its code, or a placeholder where it finds the code itself."""
        if self.modules is None:
            return code
        try:
            return put_module(self.modules, name, code)
        except OSError as error:
            self._warn(self.modules, error)
            return code

    def record(self, launch: Launch) -> None:
        if self._record is not None and self._record[0] == get_ident():
            self._record[1].append(launch)

    def find(self, text: str, name: str) -> tuple[str, bytes]:
        """Its name, which no other text has, and its code: from the folder, else compiled now."""
        if text not in self._ready:
            own = f"{name}_{hashlib.sha256(text.encode()).hexdigest()[:24]}"
            path = self.folder / f"{own}.cubin"
            try:
                code = path.read_bytes()
            except OSError:
                code = compile_cubin(text.replace(" NAME(", f" {own}("), self.architecture)
                self.keep(path, code)
            self._ready[text] = own, code
        return self._ready[text]

    def keep(self, path: Path, code: bytes) -> None:
        """The whole file or none. A folder that cannot be written costs time only: the next process compiles again."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with atomic_write(path) as out:
                out.write(code)
        except OSError as error:
            self._warn(path.parent, error)

    def _warn(self, folder: Path, error: OSError) -> None:
        if self._keeps:  # once is enough
            log.warning(f"cannot keep compiled kernels in {folder}: {error.strerror or error}")
        self._keeps = False


def library(folder: Path) -> Library | None:
    """Where compiled kernels are found to run here, by one that is tried; None: leave compiling to MLX, and say so."""
    architecture = str(mx.device_info().get("architecture", ""))
    if find_nvrtc() is None or not architecture.startswith("sm_"):
        log.info(
            f"MLX compiles kernels anew in every process: {NO_NVRTC if find_nvrtc() is None else f'device {architecture!r}'}"
        )
        return None
    by_name = Library(folder, architecture, modules=use_module_folder(folder, architecture))
    if not (problem := try_library(by_name)):
        return by_name
    by_code = Library(folder, architecture)
    if reason := try_library(by_code):
        log.info(f"MLX compiles kernels anew in every process: {reason}")
        return None
    log.info(f"MLX goes through the code of a kernel at every launch, since it does not find it by name: {problem}")
    return by_code


def try_library(library: Library) -> str:
    """Run a kernel; why it cannot be, or nothing."""
    trial = library("mlxrt_trial", ["x"], ["y"], "y[threadIdx.x] = x[threadIdx.x] + N;")
    x = mx.arange(32).astype(mx.float32)
    try:
        [y] = trial(
            inputs=[x], grid=(32, 1, 1), threadgroup=(32, 1, 1), output_shapes=[(32,)], output_dtypes=[mx.float32],
            template=[("N", 3)],
        )  # fmt: skip
        return "" if mx.array_equal(y, x + 3) else "a kernel compiled beforehand computes something else"
    except (RuntimeError, ValueError) as error:  # an MLX, driver or compiler it does not work with
        return next(iter(str(error).splitlines()), type(error).__name__)[:200]
