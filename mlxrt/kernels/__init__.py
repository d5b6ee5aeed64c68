"""Ops with kernels: one Metal text each, run by MLX on Metal and CUDA, by the simulator in tests."""

from .add_norm import add_norm
from .attention import Heads, Pages, attend_pages
from .embed import embed_rows
from .kernels import MODES, PLAIN, Gpu, Kernels, backend, gpu_of
from .matmul import matmul
from .matvec import matvec
from .op import OPS, Case, Op, Source
from .packing import Matrix

__all__ = [
    "MODES",
    "OPS",
    "PLAIN",
    "Case",
    "Gpu",
    "Heads",
    "Kernels",
    "Matrix",
    "Op",
    "Pages",
    "Source",
    "add_norm",
    "attend_pages",
    "backend",
    "embed_rows",
    "gpu_of",
    "matmul",
    "matvec",
]
