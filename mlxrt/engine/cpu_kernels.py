"""Whether a model's matrices are computed by the CPU kernels; a log line where they could be and are not."""

import logging
import os
import platform
from functools import lru_cache
from pathlib import Path

import mlx.core as mx

from .. import _openblas as blas
from ..config import EngineConfig
from ..errors import BadRequest
from ..kernels import device
from ..kernels.cpu.build import BuildError, can_round_activations, find_library
from ..kernels.cpu.library import CpuKernels
from ..weights.source.cache_dir import cache_root

log = logging.getLogger("mlxrt")

ROWS_DIFFER = (
    "BLAS: {} gives a row of a product other last bits with other numbers of rows, so a token may depend on what is"
    " computed beside it, with `deterministic` too; on x86 Linux OPENBLAS_CORETYPE=Nehalem with"
    " OMP_NUM_THREADS=1 does not, on any Linux MLXRT_BLAS=off (slow)"
)
NO_BYTES = "cpu_activations int8 does not apply: this processor has no dot products of bytes that mlxrt uses ({})"


def suits_cpu_kernels(config: EngineConfig) -> bool:
    """Whether they apply. They may not be compiled yet, which takes seconds and needs a compiler."""
    fits = config.kernels != "reference" and config.dtype in (None, "float32") and not config.compile
    return device.backend() == "cpu" and fits


def open_cpu_kernels(config: EngineConfig) -> CpuKernels | None:
    """None on a GPU, for `kernels="reference"`, a dtype other than float32, and where they cannot be built.

    Nor for compiled steps: these kernels compute at once, while such a step is only traced.
    """
    if not suits_cpu_kernels(config):
        return None
    rounds = config.cpu_activations == "int8"
    if rounds and not can_round_activations():  # before anything is compiled for it
        raise BadRequest(NO_BYTES.format(platform.machine()))
    path = locate(cache_root() / "kernels", config.cpu_activations)
    kernels = None if path is None else CpuKernels(path, choose_threads())
    if rounds and kernels is None:
        raise BadRequest("cpu_activations int8 does not apply: there are no CPU kernels here (mlxrt doctor)")
    if rounds and kernels is not None and kernels.activations != "int8":
        raise BadRequest(NO_BYTES.format(kernels.vectors))
    return kernels


@lru_cache(maxsize=8)
def locate(folder: Path, activations: str) -> Path | None:
    """The library; None, logged once, where there is none."""
    try:
        return find_library(folder, activations)
    except BuildError as error:
        log.warning(f"no CPU kernels: {error}")
        return None


@lru_cache(maxsize=1)
def products_depend_on_rows() -> bool:
    """Whether a row's product has other last bits beside other rows: then a token depends on its batch."""
    for inner, outer in ((100, 64), (576, 192)):
        x, w = (mx.random.normal((n, inner), key=mx.random.key(n)) for n in (70, outer))
        whole = x @ w.T
        if any(not mx.array_equal(x[:n] @ w.T, whole[:n]).item() for n in (1, 2, 3, 8, 17, 64)):
            return True
    return False


def choose_threads() -> int:
    """As many as OpenBLAS uses, which leaves busy cores to others; without it OMP_NUM_THREADS, or all cores."""
    if threads := blas.num_threads():
        return threads
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(int(wanted), cores) if wanted.isdecimal() and int(wanted) else cores
