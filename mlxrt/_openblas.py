"""A real BLAS under MLX's float32 matmuls on Linux CPUs.

MLX's CPU wheel carries the reference BLAS (2.5 GFLOP/s where OpenBLAS does 60). Symbols found in the process before
MLX is imported win, so an OpenBLAS with plain names is loaded globally first: the one inside the faiss-cpu or
cvxopt wheel, or the system's. A token must not depend on how many rows ran beside it, so neither may a row's product:
that decides which of OpenBLAS's kernels are used (choose_kernels), and numpy's own OpenBLAS does not serve at all.
Imports no mlx, and nothing that takes long, such as pathlib or re: it is half of what `import mlxrt` takes besides MLX.
"""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

LOAD_FILE = "/proc/loadavg"
SYSTEM = ("libopenblas.so.0", "libopenblasp.so.0", "libopenblas.so")
WHEELS = (("faiss", "faiss_cpu.libs"), ("cvxopt", "cvxopt.libs"))
# Libraries the wheels' OpenBLAS needs; they sit beside it under names only the wheel's own loader path finds.
NEEDED = ("libgomp", "libquadmath", "libgfortran")


# OpenBLAS chooses its kernels by the processor's model, and takes one that is newer than itself for a Prescott of 2004.
KERNELS = "OPENBLAS_CORETYPE"
AVX512 = {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"}
SMALL_KERNELS = 17  # from 0.3.17 on SkylakeX has others for small products, which add in another order

LATE = "MLX's own (reference BLAS, slow): MLX was imported before mlxrt; import mlxrt first"
OFF = "MLX's own (reference BLAS, slow): MLXRT_BLAS is off"
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
        load(wanted)
        return
    for package, folder in WHEELS:
        if load_from_wheel(package, folder):
            return
    for library in SYSTEM:
        try:
            load(library)
            return
        except OSError:
            continue


def load(library: str) -> None:
    """An OpenBLAS, with kernels that compute a row alike whatever is computed beside it."""
    with set_variable(KERNELS, choose_kernels(library, processor_flags())):
        ctypes.CDLL(library, ctypes.RTLD_GLOBAL)


def choose_kernels(library: str, flags: set[str]) -> str | None:
    """The name of OpenBLAS's kernels to use on an x86 processor; None: those it chooses itself.

    Those for Haswell, Zen and Prescott give a row other last bits with other numbers of rows, and so do SkylakeX's from
    0.3.17 on. Nehalem's do not, where the number of outputs is even and divides evenly among the threads. Nor do
    Sandybridge's, but they leave registers so that what MLX computes next takes 40 times as long (docs/decisions/0003).
    """
    version = os.path.basename(library).partition(".3.")[2].partition(".so")[0]
    if flags >= AVX512 and version.isdecimal() and int(version) < SMALL_KERNELS:
        return "SkylakeX"
    return "Nehalem" if "sse4_2" in flags else None


def processor_flags() -> set[str]:
    """What an x86 processor can do, by Linux's names; of any other processor nothing."""
    if os.uname().machine != "x86_64":
        return set()
    try:
        # A line at a time: it is long where there are many cores.
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next((set(line.split()) for line in lines if line.startswith("flags")), set())
    except OSError:
        return set()


@contextmanager
def set_variable(name: str, value: str | None) -> Iterator[None]:
    """For a moment, so that nobody else sees it: numpy's OpenBLAS would read it, too. One that the user set stays."""
    if value is None or name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


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
        with open(LOAD_FILE, encoding="utf-8") as file:
            average, _, _, tasks, _ = file.read().split()
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
    libs = os.path.join(os.path.dirname(os.path.dirname(spec.origin)), folder)
    try:
        libraries = [os.path.join(libs, name) for name in sorted(os.listdir(libs))]
        for name in NEEDED:
            for path in find_libraries(libraries, name):
                ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
        for path in find_libraries(libraries, "libopenblas"):
            load(path)
            return True
    except OSError:
        return False  # `running()` tells, and the next candidate may load
    return False


def find_libraries(paths: list[str], name: str) -> list[str]:
    return [path for path in paths if os.path.basename(path).startswith(name)]


class Location(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def slow() -> bool:
    """Whether matmuls crawl for want of a BLAS."""
    return running() in (LATE, MISSING, OFF)


def running() -> str:
    """Which library answers for MLX's CPU matmuls, as a person would say it."""
    if sys.platform == "darwin":
        return "Accelerate"
    try:
        program = ctypes.CDLL(None)
        function, dladdr = program.cblas_sgemm, program.dladdr
    except (AttributeError, OSError):
        if os.environ.get("MLXRT_BLAS") == "off":
            return OFF
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
