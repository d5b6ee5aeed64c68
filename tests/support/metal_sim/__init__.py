"""Metal kernels on a CPU, for tests only: mx.fast.metal_kernel's call; bounds, races, barriers, first use checked."""

from .findings import Finding, MetalCompileError, MetalSimError, NoCompiler
from .runtime import ASCENDING, DESCENDING, SHUFFLED
from .simulator import Kernel, Launch, Simulator, metal_kernel

__all__ = [
    "ASCENDING",
    "DESCENDING",
    "SHUFFLED",
    "Finding",
    "Kernel",
    "Launch",
    "MetalCompileError",
    "MetalSimError",
    "NoCompiler",
    "Simulator",
    "metal_kernel",
]
