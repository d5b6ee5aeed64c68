"""`metal_kernel`, as mx.fast has it, on a CPU: the same call, the same text, checked while it runs.

A Simulator is how kernels are run (thread order, what counts as an error) and the record of what they did.
"""

import ctypes
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from . import arrays
from .findings import NOTES, TOLERATED, Finding, MetalSimError
from .runtime import ASCENDING, CONSTANT, INPUT, Machine, machine
from .text import Argument, Definition, KernelText
from .toolchain import build, preprocess
from .translate import to_cpp

MOST_THREADS, MOST_BUFFERS = 1024, 31


@dataclass(frozen=True)
class Launch:
    kernel: str
    text: str
    findings: tuple[Finding, ...]
    stats: dict[str, int]
    seconds: float


class Simulator:
    """`order`: which threads run first. `portable`: what our own kernels may not do is an error too.
    `strict`: an error raises MetalSimError; otherwise it is kept in `launches` for whoever asks."""

    def __init__(
        self,
        order: int = ASCENDING,
        seed: int = 0,
        *,
        checked: bool = True,
        strict: bool = True,
        portable: bool = False,
        seconds: int = 60,
        folder: Path | None = None,
    ):
        self.order, self.seed, self.checked, self.strict = order, seed, checked, strict
        self.harmless = NOTES if portable else NOTES | TOLERATED
        self.seconds, self.folder = seconds, folder
        self.launches: list[Launch] = []

    def metal_kernel(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        ensure_row_contiguous: bool = True,
        atomic_outputs: bool = False,
        compile_options: object | None = None,
    ) -> "Kernel":
        definition = Definition(name, tuple(input_names), tuple(output_names), source, header, atomic_outputs)
        return Kernel(self, definition, ensure_row_contiguous)

    def errors(self) -> list[Finding]:
        """Of all launches so far."""
        return [f for launch in self.launches for f in launch.findings if f.kind not in self.harmless]


@dataclass(frozen=True)
class Output:
    address: int
    region: int
    shape: tuple[int, ...]
    dtype: mx.Dtype


class Kernel:
    def __init__(self, simulator: Simulator, definition: Definition, ensure_row_contiguous: bool):
        self.simulator, self.definition, self.ensure_row_contiguous = simulator, definition, ensure_row_contiguous

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array | bool | int | float],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Sequence[tuple[str, bool | int | mx.Dtype]] | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: object | None = None,
    ) -> list[mx.array]:
        given = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
        given = [mx.contiguous(x) for x in given] if self.ensure_row_contiguous else given
        mx.eval(given)  # all at once
        self.refuse(given, output_shapes, output_dtypes, grid, threadgroup)
        text = self.definition.text(given, output_dtypes, list(template or ()))
        if verbose:
            print(text.text)
        shapes = [tuple(shape) for shape in output_shapes]
        with machine(self.simulator.checked) as own:
            outputs = self.place(own, text.arguments, given, shapes, output_dtypes, init_value)
            self.run(own, text, outputs, grid, threadgroup)
            return [
                arrays.array(ctypes.string_at(o.address, arrays.byte_count(o.shape, o.dtype)), o.shape, o.dtype)
                for o in outputs
            ]

    def refuse(self, inputs, shapes, dtypes, grid, threadgroup) -> None:
        own = self.definition
        if len(inputs) != len(own.input_names):
            raise ValueError(f"{own.name}: {len(inputs)} inputs, expected {len(own.input_names)}: {own.input_names}")
        if not len(shapes) == len(dtypes) == len(own.output_names):
            raise ValueError(
                f"{own.name}: {len(shapes)} shapes and {len(dtypes)} dtypes for outputs {own.output_names}"
            )
        if len(grid) != 3 or len(threadgroup) != 3 or min(*grid, *threadgroup) < 1:
            raise ValueError(f"{own.name}: grid {grid} and threadgroup {threadgroup} must be three positive numbers")
        if math.prod(threadgroup) > MOST_THREADS:
            raise ValueError(f"{own.name}: {math.prod(threadgroup)} threads in a threadgroup, {MOST_THREADS} at most")

    def place(self, own: Machine, arguments: Sequence[Argument], inputs, shapes, dtypes, init_value) -> list[Output]:
        """Buffers in the order of the signature."""
        outputs, strides = [], []
        for a in arguments:
            if a.role == "in":
                x = inputs[a.number]
                raw, strides, offset = arrays.memory(x)
                own.buffer(a.name, raw, x.dtype.size, INPUT, offset)
            elif a.role == "out":
                shape, dtype = shapes[a.number], dtypes[a.number]
                value = None if init_value is None else arrays.memory(mx.full(shape, init_value, dtype=dtype))[0]
                place = own.output(a.name, arrays.byte_count(shape, dtype), dtype.size, value)
                outputs.append(Output(*place, shape, dtype))
            else:
                x = inputs[a.number]
                values = {"_shape": x.shape, "_strides": strides, "_ndim": [x.ndim]}[a.role]
                raw = np.array(values, np.int64 if a.role == "_strides" else np.int32)
                own.buffer(a.name, raw.tobytes(), raw.itemsize, CONSTANT)
        return outputs

    def run(self, own: Machine, text: KernelText, outputs: list[Output], grid, threadgroup) -> None:
        sim = self.simulator
        library = compile_text(text, sim.checked, sim.folder)
        group = [min(t, g) for t, g in zip(threadgroup, grid)]
        start = time.perf_counter()
        stats = own.run(library, grid, group, sim.order, sim.seed, sim.seconds)
        seconds = time.perf_counter() - start
        found = own.findings(library)
        aborted = any(f.kind in ("timeout", "crash") for f in found)
        if sim.checked and not aborted:
            found += [f for o in outputs for f in self.unwritten(own, o)]
        if any(g % t for g, t in zip(grid, threadgroup)):
            found.append(Finding("ragged-grid", f"grid {grid} is no whole number of threadgroups {threadgroup}"))
        if len(own.pointers) > MOST_BUFFERS:
            found.append(Finding("buffers", f"{len(own.pointers)} buffers, Metal allows {MOST_BUFFERS}"))
        launch = Launch(self.definition.name, text.text, tuple(found), stats, seconds)
        sim.launches.append(launch)
        errors = [f for f in found if f.kind not in sim.harmless]
        if errors and sim.strict:
            raise MetalSimError(self.definition.name, errors)

    def unwritten(self, own: Machine, output: Output) -> list[Finding]:
        count, first = own.unwritten(output.region)
        if not count:
            return []
        told = f"{count} of {math.prod(output.shape)} elements were never written, first index {first}"
        return [Finding("unwritten-output", told)]


BUILT: dict[tuple[KernelText, bool, Path | None], Path] = {}


def compile_text(text: KernelText, checked: bool, folder: Path | None) -> Path:
    """The library of a kernel; those of this process are known by their text, without translating it again."""
    key = text, checked, folder
    if key not in BUILT or not BUILT[key].exists():
        BUILT[key] = build_text(text, checked, folder)
    return BUILT[key]


def build_text(text: KernelText, checked: bool, folder: Path | None) -> Path:
    if '#include "' not in text.text:
        return build(to_cpp(text), checked, False, folder)
    inside = KernelText(text.name, text.instance, preprocess(text.text), text.arguments, text.attributes)
    return build(to_cpp(inside), checked, True, folder)


metal_kernel = Simulator().metal_kernel
