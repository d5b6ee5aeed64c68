"""Which implementation of an op runs here: our kernel where the device has one that fits, else plain MLX.

Made once at load and held by the modules that compute; nothing in the process is global. A call that falls back says
so once, with its reason; in `strict` mode it is an error.
"""

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import BadRequest, NoKernel
from .constant_buffer import TYPE_NAMES, PackedArray, pack_arrays
from .cpu.library import CpuKernels
from .cuda import nvrtc
from .device import DeviceProfile, profile
from .dtypes import HALVES
from .metal_source import shim
from .registry import KernelSource, Op

log = logging.getLogger("mlxrt")

MODES = ("auto", "strict", "reference")
Factory = Callable[..., Any]  # mx.fast.metal_kernel, or something that stands in for it


class Gpu:
    """Launches kernels on a device. One kernel object per source: MLX compiles it for each set of constants."""

    def __init__(self, name: str, make: Factory, header: str, profile: DeviceProfile):
        self.name, self.profile, self._make, self._header = name, profile, make, header
        self._kernels: dict[tuple[str, ...], Any] = {}
        self._packed: dict[int, PackedArray] = {}  # by the id of an array that is part of a constant buffer
        self.launches = 0

    @property
    def library(self) -> nvrtc.Library | None:
        """Where its kernels are compiled, if that is our own doing."""
        return self._make if isinstance(self._make, nvrtc.Library) else None

    @property
    def constant_buffers(self) -> list[mx.array]:
        return [p.buffer for p in self._packed.values()]

    def pack_constants(self, arrays: Sequence[mx.array]) -> list[mx.array]:
        """The same arrays, in one buffer if they can be: kernels that read several of them get it as one input."""
        fits = len(arrays) > 1 and all(a.dtype in TYPE_NAMES and a.size for a in arrays)
        if not fits or any(id(a) in self._packed for a in arrays):
            return list(arrays)
        packed = pack_arrays(list(arrays))
        self._packed |= {id(p.array): p for p in packed}
        return [p.array for p in packed]

    def __call__(
        self,
        source: KernelSource,
        inputs: Sequence[Any],
        groups: tuple[int, int, int] | int,
        size: int,
        outputs: Sequence[tuple[Sequence[int], mx.Dtype]],
        **constants: Any,
    ) -> list[mx.array]:
        """`groups` threadgroups of `size` threads; `outputs` are (shape, dtype); constants become template arguments.

        Each input costs the host time. One that is None is not passed: in the source the first one stands in for it.
        Those that share a constant buffer are passed as one.
        """
        passed: dict[str, mx.array] = {}
        lines, absent = [], []
        buffers: dict[int, str] = {}
        for name, a in zip(source.inputs, inputs, strict=True):
            if a is None:
                absent.append(name)
            elif packed := self._packed.get(id(a)):
                buffer = buffers.setdefault(id(packed.buffer), f"buffer{len(buffers)}")
                passed[buffer] = packed.buffer
                lines.append(packed.declaration(name, buffer))
                constants[f"OFFSET_{name}"] = packed.offset
            else:
                passed[name] = a
        lines += [f"auto {name} = {next(iter(passed))};" for name in absent]
        key = (source.name, *passed, *lines)
        if key not in self._kernels:
            self._kernels[key] = self._make(
                name=kernel_name(source.name, lines),
                input_names=list(passed),
                output_names=list(source.outputs),
                source="\n".join([*lines, source.body]),
                header=self._header + source.helpers,
            )
        x, y, z = (groups, 1, 1) if isinstance(groups, int) else groups
        self.launches += 1
        return self._kernels[key](
            inputs=list(passed.values()),
            grid=(x * size, y, z),
            threadgroup=(size, 1, 1),
            output_shapes=[tuple(shape) for shape, _ in outputs],
            output_dtypes=[dtype for _, dtype in outputs],
            template=list(constants.items()),
        )


def kernel_name(source: str, lines: list[str]) -> str:
    """MLX knows a compiled kernel by its name: another source needs another one, the same in every process."""
    return f"{source}_of_{hashlib.sha256(''.join(lines).encode()).hexdigest()[:8]}" if lines else source


def make_gpu(name: str, make: Factory | None = None, folder: Path | None = None) -> Gpu | None:
    """Launches kernels on `name`, metal or cuda; None for cpu. `folder`: where compiled CUDA kernels are kept for the next
    process. `make` stands in for MLX's factory in tests."""
    if name == "metal":
        return Gpu(name, make or mx.fast.metal_kernel, shim(name), profile(name))
    if name != "cuda":
        return None
    library = nvrtc.library(folder) if folder is not None and make is None else None
    return Gpu(name, make or library or mx.fast.cuda_kernel, shim(name), profile(name))


class Kernels:
    """`cpu`: kernels in C, for a device without a GPU; of packed matrices alone."""

    def __init__(self, mode: str = "auto", gpu: Gpu | None = None, cpu: CpuKernels | None = None):
        if mode not in MODES:
            raise BadRequest(f"kernels must be one of {', '.join(MODES)}, not {mode!r}")
        self.mode, self.gpu, self.cpu = mode, gpu, cpu if mode != "reference" else None
        # Called once for an op and dtype, before its first launch.
        self.self_test: Callable[[Op, str], Any] | None = None
        self._tested: set[tuple[str, str]] = set()
        self.graph_mode = False  # steps are launched as one graph: fusing kernels saves the host nothing
        self.disabled: dict[str, str] = {}  # op -> why its kernel is not used on this machine
        self.used: dict[str, int] = {}  # op -> calls computed by our kernel
        self.fallbacks: dict[tuple[str, str], int] = {}  # (op, reason) -> calls computed by plain MLX instead
        if mode == "strict" and gpu is None:
            raise NoKernel("kernels='strict' needs a GPU: this device runs plain MLX only; use kernels='auto'")

    def run(self, op: Op, /, **arguments: Any) -> Any:
        """The op by its kernel where one fits, else by its fallback."""
        if self.cpu is not None and op.cpu_launch is not None:
            return self._run_on_cpu(op, self.cpu, arguments)
        if not self.accepts(op, **arguments):
            return self._fall_back(op, arguments)
        assert op.launch is not None
        self.used[op.name] = self.used.get(op.name, 0) + 1
        try:
            return op.launch(self.gpu, **arguments)
        except (RuntimeError, ValueError) as error:
            error.add_note(f"in the kernel of {describe_call(op, arguments)}")
            raise

    def accepts(self, op: Op, /, **arguments: Any) -> bool:
        """Whether the op's kernel for the GPU takes this call. Where it cannot, that is reported: in strict mode an error."""
        if self.gpu is None or self.mode == "reference" or op.launch is None:
            return False
        if not op.is_faster(**arguments):
            return False  # measured: the fallback is faster for this shape
        if not (reason := op.unsupported(**arguments)):
            self._test_once(op, compute_dtype(arguments.values()))
            reason = self.disabled.get(op.name)
        if reason:
            self.report_fallback(op, reason, "plain MLX" if op.unfused is None else "several launches")
        return not reason

    def _run_on_cpu(self, op: Op, cpu: CpuKernels, arguments: dict[str, Any]) -> Any:
        assert op.cpu_launch is not None
        if reason := op.cpu_unsupported(**arguments) or self.disabled.get(op.name):
            self.report_fallback(op, reason)
            return self._fall_back(op, arguments)
        self.used[op.name] = self.used.get(op.name, 0) + 1
        return op.cpu_launch(cpu, **arguments)

    def _fall_back(self, op: Op, arguments: dict[str, Any]) -> Any:
        if op.unfused is not None:
            return op.unfused(self, **arguments)
        try:
            return op.reference(**arguments)
        except (RuntimeError, ValueError) as error:
            error.add_note(f"in {describe_call(op, arguments)}")
            raise

    @contextmanager
    def capturing(self, graph: bool) -> Iterator[None]:
        """`graph`: the step is captured as one graph, so the kernels that are fastest on the device are chosen."""
        before, self.graph_mode = self.graph_mode, self.graph_mode or graph
        try:
            yield
        finally:
            self.graph_mode = before

    @property
    def num_tested(self) -> int:
        """Self-tests so far: while one runs, other launches than a model's are made."""
        return len(self._tested)

    def _test_once(self, op: Op, dtype: str) -> None:
        if self.self_test is not None and (op.name, dtype) not in self._tested:
            self._tested.add((op.name, dtype))
            self.self_test(op, dtype)

    def report_fallback(self, op: Op, reason: str, instead: str = "plain MLX") -> None:
        """An op's kernel cannot be used here: logged once, an error in strict mode."""
        if self.mode == "strict":
            raise NoKernel(f"{op.name}: {reason}; use kernels='auto' to compute it with {instead}")
        key = (op.name, reason)
        if key not in self.fallbacks:
            log.warning(f"{op.name} runs as {instead}: {reason}")
        self.fallbacks[key] = self.fallbacks.get(key, 0) + 1


def describe_call(op: Op, arguments: dict[str, Any]) -> str:
    """The op and the shapes it was given, for messages."""
    given = ", ".join(f"{name} {list(a.shape)}" for name, a in arguments.items() if isinstance(a, mx.array))
    return f"{op.name}({given})"


def compute_dtype(arguments: Iterable[Any]) -> str:
    """The type a call computes in: half precision if anything in it is, else float32."""
    for value in arguments:
        dtype = value.dtype if isinstance(value, mx.array) else value
        if isinstance(dtype, mx.Dtype) and dtype in HALVES:
            return "float16" if dtype == mx.float16 else "bfloat16"
    return "float32"


PLAIN = Kernels("reference")
