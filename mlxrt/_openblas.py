"""A real BLAS under MLX's float32 matmuls on Linux CPUs.

MLX's CPU wheel carries the reference BLAS (2.5 GFLOP/s where OpenBLAS does 60). Symbols found in the process before
MLX is imported win, so an OpenBLAS with plain names is loaded globally first: the one inside the faiss-cpu or
cvxopt wheel, or the system's. numpy's own does not serve: its one-row products differ from its many-row ones, and a
token must not depend on how many rows ran beside it. Imports no mlx.
"""

import ctypes
import os
import sys
from importlib.util import find_spec
from pathlib import Path

SYSTEM = ("libopenblas.so.0", "libopenblasp.so.0", "libopenblas.so")
WHEELS = (("faiss", "faiss_cpu.libs"), ("cvxopt", "cvxopt.libs"))
# Libraries the wheels' OpenBLAS needs; they sit beside it under names only the wheel's own loader path finds.
NEEDED = ("libgomp", "libquadmath", "libgfortran")


LATE = "MLX's own (reference BLAS, slow): MLX was imported before mlxrt; import mlxrt first"
MISSING = "MLX's own (reference BLAS, slow); pip install 'mlxrt[cpu]' brings OpenBLAS"


def preload() -> None:
    """Load the first OpenBLAS found. MLXRT_BLAS names a library, or is `off`."""
    if not sys.platform.startswith("linux") or "mlx.core" in sys.modules:
        return  # MLX binds its symbols when it is loaded: later is too late
    # OpenMP's threads spin for milliseconds between two matmuls by default: five times slower on a busy machine,
    # no faster on a quiet one. Read by the library when it is loaded.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    wanted = os.environ.get("MLXRT_BLAS")
    if wanted == "off":
        return
    if wanted:
        ctypes.CDLL(wanted, ctypes.RTLD_GLOBAL)
        return
    for package, folder in WHEELS:
        if load_from_wheel(package, folder):
            return
    for library in SYSTEM:
        try:
            ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
            return
        except OSError:
            continue


def yield_to_others() -> str:
    """Use no more threads than there are idle cores; returns what was done, if anything.

    A product waits for the slowest of its threads: one that has to wait for a core makes a model many times slower.
    Whoever sets OMP_NUM_THREADS or OPENBLAS_NUM_THREADS has chosen already.
    """
    chosen = {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"} & os.environ.keys()
    if chosen or not sys.platform.startswith("linux"):
        return ""
    try:
        program = ctypes.CDLL(None)
        threads, set_threads = program.openblas_get_num_threads(), program.openblas_set_num_threads
        average, _, _, tasks, _ = Path("/proc/loadavg").read_text().split()
    except (AttributeError, OSError, ValueError):
        return ""
    # The average of the last minute, unless less is running at this moment: a build that has just ended does not count.
    load = min(float(average), int(tasks.partition("/")[0]) - 1)
    free = max(1, round(len(os.sched_getaffinity(0)) - load))
    if free >= threads:
        return ""
    set_threads(free)
    return f"the machine is busy (load {load:.1f}): {free} of {threads} threads; OMP_NUM_THREADS sets another number"


def num_threads() -> int | None:
    """Threads of the OpenBLAS in this process; None where there is none."""
    try:
        return int(ctypes.CDLL(None).openblas_get_num_threads())
    except (AttributeError, OSError):
        return None


def load_from_wheel(package: str, folder: str) -> bool:
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        return False
    libs = Path(spec.origin).parent.parent / folder
    try:
        for name in NEEDED:
            for path in sorted(libs.glob(f"{name}*")):
                ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
        for path in sorted(libs.glob("libopenblas*")):
            ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
            return True
    except OSError:
        return False  # `running()` tells, and the next candidate may load
    return False


class Location(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def slow() -> bool:
    """Whether matmuls crawl for want of a BLAS."""
    return running() in (LATE, MISSING)


def running() -> str:
    """Which library answers for MLX's CPU matmuls, as a person would say it."""
    if sys.platform == "darwin":
        return "Accelerate"
    try:
        program = ctypes.CDLL(None)
        function, dladdr = program.cblas_sgemm, program.dladdr
    except (AttributeError, OSError):
        return LATE if any(find_spec(package) for package, _ in WHEELS) else MISSING
    found = Location()
    if not dladdr(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(found)) or not found.file:
        return "unknown"
    path = found.file.decode(errors="replace")
    try:
        version = program.openblas_get_config
    except AttributeError:
        return path
    version.restype = ctypes.c_char_p
    threads = program.openblas_get_num_threads()
    return f"{version().decode()} with {threads} threads ({path})"
