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
from .constant_buffer import NAMES, Place, lay
from .cuda import nvrtc as cuda_compiler
from .metal_source import shim
from .registry import InlineSource, Op, Source

log = logging.getLogger("mlxrt")

MODES = ("auto", "strict", "reference")
Factory = Callable[..., Any]  # mx.fast.metal_kernel, or something that stands in for it


def backend() -> str:
    """What custom kernels run on: metal, cuda or, where there is no GPU, reference."""
    if mx.default_device() == mx.Device(mx.cpu):
        return "reference"
    return "metal" if mx.metal.is_available() else "cuda"


class Gpu:
    """Launches Metal texts on a device. One kernel object per text: MLX compiles it for each set of constants."""

    def __init__(self, name: str, make: Factory, header: str):
        self.name, self._make, self._header = name, make, header
        self._made: dict[tuple[str, ...], Any] = {}
        self._places: dict[int, Place] = {}  # by the id of an array that lies in a bundle
        self.launches = 0

    @property
    def library(self) -> cuda_compiler.Library | None:
        """Where its kernels are compiled, if that is our own doing."""
        return self._make if isinstance(self._make, cuda_compiler.Library) else None

    @property
    def bundles(self) -> list[mx.array]:
        return [place.whole for place in self._places.values()]

    def bundle(self, arrays: Sequence[mx.array]) -> list[mx.array]:
        """The same arrays, in one buffer if they can be: kernels that read several of them get it as one input."""
        fits = len(arrays) > 1 and all(a.dtype in NAMES and a.size for a in arrays)
        if not fits or any(id(a) in self._places for a in arrays):
            return list(arrays)
        places = lay(list(arrays))
        self._places |= {id(p.array): p for p in places}
        return [p.array for p in places]

    def __call__(
        self,
        source: Source | InlineSource,
        inputs: Sequence[Any],
        groups: tuple[int, int, int] | int,
        size: int,
        outputs: Sequence[tuple[Sequence[int], mx.Dtype]],
        **constants: Any,
    ) -> list[mx.array]:
        """`groups` threadgroups of `size` threads; `outputs` are (shape, dtype); constants become template arguments.

        Each input costs the host time. One that is None is not passed: in the text the first one stands in for it.
        Those that lie in one bundle are passed as one.
        """
        passed: dict[str, mx.array] = {}
        lines, absent = [], []
        wholes: dict[int, str] = {}
        for name, a in zip(source.inputs, inputs, strict=True):
            if a is None:
                absent.append(name)
            elif place := self._places.get(id(a)):
                whole = wholes.setdefault(id(place.whole), f"whole{len(wholes)}")
                passed[whole] = place.whole
                lines.append(place.line(name, whole))
                constants[f"AT_{name}"] = place.at
            else:
                passed[name] = a
        lines += [f"auto {name} = {next(iter(passed))};" for name in absent]
        key = (source.name, *passed, *lines)
        if key not in self._made:
            self._made[key] = self._make(
                name=named(source.name, lines),
                input_names=list(passed),
                output_names=list(source.outputs),
                source="\n".join([*lines, source.body]),
                header=self._header + source.helpers,
            )
        x, y, z = (groups, 1, 1) if isinstance(groups, int) else groups
        self.launches += 1
        return self._made[key](
            inputs=list(passed.values()),
            grid=(x * size, y, z),
            threadgroup=(size, 1, 1),
            output_shapes=[tuple(shape) for shape, _ in outputs],
            output_dtypes=[dtype for _, dtype in outputs],
            template=list(constants.items()),
        )


def named(source: str, lines: list[str]) -> str:
    """MLX knows a compiled kernel by its name: another text needs another one, the same in every process."""
    return f"{source}_of_{hashlib.sha256(''.join(lines).encode()).hexdigest()[:8]}" if lines else source


def make_gpu(
    name: str,
    make: Factory | None = None,
    folder: Path | None = None,
) -> Gpu | None:
    """`folder`: where kernels that take long to compile are kept for the next process; `say` hears if they cannot be."""
    if name == "metal":
        return Gpu(name, make or mx.fast.metal_kernel, shim(name))
    if name != "cuda":
        return None
    kept = cuda_compiler.library(folder) if folder is not None and make is None else None
    return Gpu(name, make or kept or mx.fast.cuda_kernel, shim(name))


class Kernels:
    def __init__(self, mode: str = "auto", gpu: Gpu | None = None):
        if mode not in MODES:
            raise BadRequest(f"kernels must be one of {', '.join(MODES)}, not {mode!r}")
        self.mode, self.gpu = mode, gpu
        self.judge: Callable[[Op, str], Any] | None = None  # asked once for an op and dtype, before its first launch
        self._judged: set[tuple[str, str]] = set()
        self.graph_mode = False  # steps are launched as one graph: fusing kernels saves the host nothing
        self.disabled: dict[str, str] = {}  # op -> why its kernel is not used on this machine
        self.used: dict[str, int] = {}  # op -> calls computed by our kernel
        self.fallbacks: dict[tuple[str, str], int] = {}  # (op, reason) -> calls computed by plain MLX instead
        if mode == "strict" and gpu is None:
            raise NoKernel("kernels='strict' needs a GPU: this device runs plain MLX only; use kernels='auto'")

    def run(self, op: Op, /, **arguments: Any) -> Any:
        """The op by its kernel where one fits, else by its fallback."""
        if self.gpu is None or self.mode == "reference" or op.launch is None:
            return self._fall_back(op, arguments)
        if not op.is_faster(**arguments):
            return self._fall_back(op, arguments)  # measured: it is faster for this shape
        if not (reason := op.unsupported(**arguments)):
            self._ask(op, computed_in(arguments.values()))
            reason = self.disabled.get(op.name)
        if reason:
            self.report_fallback(op, reason, "plain MLX" if op.unfused is None else "several launches")
            return self._fall_back(op, arguments)
        self.used[op.name] = self.used.get(op.name, 0) + 1
        return op.launch(self.gpu, **arguments)

    def _fall_back(self, op: Op, arguments: dict[str, Any]) -> Any:
        return op.reference(**arguments) if op.unfused is None else op.unfused(self, **arguments)

    @contextmanager
    def capturing(self, graph: bool) -> Iterator[None]:
        """`graph`: the step is captured as one graph, so the kernels that are fastest on the device are chosen."""
        before, self.graph_mode = self.graph_mode, self.graph_mode or graph
        try:
            yield
        finally:
            self.graph_mode = before

    @property
    def judged(self) -> int:
        """Ops that were asked about so far: while one is judged, other launches than a model's are made."""
        return len(self._judged)

    def _ask(self, op: Op, dtype: str) -> None:
        if self.judge is not None and (op.name, dtype) not in self._judged:
            self._judged.add((op.name, dtype))
            self.judge(op, dtype)

    def report_fallback(self, op: Op, reason: str, instead: str = "plain MLX") -> None:
        """An op's kernel cannot be used here: said once, or an error in strict mode."""
        if self.mode == "strict":
            raise NoKernel(f"{op.name}: {reason}; use kernels='auto' to compute it with {instead}")
        key = (op.name, reason)
        if key not in self.fallbacks:
            log.warning(f"{op.name} runs as {instead}: {reason}")
        self.fallbacks[key] = self.fallbacks.get(key, 0) + 1


def computed_in(arguments: Iterable[Any]) -> str:
    """The type a call computes in: half precision if anything in it is, else float32."""
    for value in arguments:
        dtype = value.dtype if isinstance(value, mx.array) else value
        if isinstance(dtype, mx.Dtype) and dtype in (mx.float16, mx.bfloat16):
            return "float16" if dtype == mx.float16 else "bfloat16"
    return "float32"


PLAIN = Kernels("reference")
