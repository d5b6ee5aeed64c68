"""One op: what it means in plain MLX, where a kernel may replace it, and the cases that prove the kernel right.

The reference is the definition. A kernel that is registered here is tested, mutated and measured, because tests and
benchmarks walk this registry. Knows no devices: `Kernels` launches.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from . import metal_source

OPS: dict[str, "Op"] = {}


@dataclass(frozen=True)
class KernelSource:
    """One kernel: a file of kernels/metal, and the `#define`s that choose its variant."""

    file: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    defines: Mapping[str, int] = field(default_factory=dict)
    variant: str = ""  # tells kernels of one file apart, in names that compilers and profilers show

    @cached_property
    def name(self) -> str:
        stem = self.file.removesuffix(".metal")
        return f"mlxrt_{stem}_{self.variant}" if self.variant else f"mlxrt_{stem}"

    @property
    def body(self) -> str:
        return metal_source.load(self.file).body

    @property
    def helpers(self) -> str:
        lines = [f"#define {name} {value}\n" for name, value in self.defines.items()]
        return "".join(lines) + metal_source.load(self.file).helpers


@dataclass(frozen=True)
class Case:
    """One call to prove a kernel with. `arrays` and `options` are the op's arguments; arrays come in float32."""

    name: str
    arrays: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    large: bool = False  # too slow for the simulator: run on real hardware only

    def arguments(self) -> dict[str, Any]:
        return {**self.arrays, **self.options}


@dataclass
class Op:
    name: str
    reference: Callable[..., Any]
    cases: Callable[[Any], Iterator[Case]]  # of a dtype
    tolerance: dict[str, float]  # dtype name -> largest error, relative to the reference's largest number
    unfused: Callable[..., Any] | None = None  # (kernels, **arguments): by other ops, where the kernel fuses several
    launch: Callable[..., Any] | None = None
    unsupported: Callable[..., str | None] = lambda *_, **__: None  # why the kernel cannot take these arguments
    is_faster: Callable[..., bool] = lambda *_, **__: True  # False where MLX's own ops were measured to be faster
    sources: tuple[KernelSource, ...] = ()
    cpu_launch: Callable[..., Any] | None = None  # (cpu kernels, **arguments): in C, at once
    cpu_unsupported: Callable[..., str | None] = lambda *_, **__: None
    cpu_cases: Callable[[], Iterator[Case]] = lambda: iter(())

    def cpu_kernel(self, unsupported: Callable[..., str | None], cases: Callable[[], Iterator[Case]]):
        """Decorates the function launch(cpu, **arguments) that computes the op by the kernels of kernels/cpu, in float32.
        `cases`: more of them, for what other devices do not read."""

        def add(launch: Callable[..., Any]) -> Callable[..., Any]:
            self.cpu_launch, self.cpu_unsupported, self.cpu_cases = launch, unsupported, cases
            return launch

        return add

    def kernel(
        self,
        *sources: KernelSource,
        unsupported: Callable[..., str | None] | None = None,
        is_faster: Callable[..., bool] | None = None,
    ):
        """Decorates the function launch(gpu, **arguments) that computes the op by these kernels."""

        def add(launch: Callable[..., Any]) -> Callable[..., Any]:
            if self.launch is not None:
                raise ValueError(f"{self.name} has a kernel already")
            self.launch, self.sources = launch, sources
            self.unsupported, self.is_faster = unsupported or self.unsupported, is_faster or self.is_faster
            return launch

        return add


TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}


def op(
    cases: Callable[[Any], Iterator[Case]],
    tolerance: dict[str, float] | None = None,
    unfused: Callable[..., Any] | None = None,
):
    """Registers the decorated function as the meaning of an op of its name."""

    def make(reference: Callable[..., Any]) -> Op:
        if reference.__name__ in OPS:
            raise ValueError(f"op {reference.__name__} is registered twice")
        made = Op(reference.__name__, reference, cases, TOLERANCE | (tolerance or {}), unfused)
        OPS[reference.__name__] = made
        return made

    return make
