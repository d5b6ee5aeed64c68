"""Ops with kernels: one Metal text each, run by MLX on Metal and CUDA, by the simulator in tests."""

from .kernels import MODES, PLAIN, Gpu, Kernels, backend, gpu_of
from .matvec import matvec
from .op import OPS, Case, Op, Source
from .packing import Matrix

__all__ = ["MODES", "OPS", "PLAIN", "Case", "Gpu", "Kernels", "Matrix", "Op", "Source", "backend", "gpu_of", "matvec"]
