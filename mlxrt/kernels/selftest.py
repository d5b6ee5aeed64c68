"""Kernel self-test: compares kernels with their references on this machine and disables those that are wrong.

A GPU's compiler is not ours to trust, and most machines are none we have seen. Before an op's first launch its kernel
runs a few of the op's own cases, once per device, system, MLX version and kernel source; results are kept in a file. A
kernel that disagrees with its reference, does not compile, or crashed the process is disabled with a warning, and plain
MLX computes the op. Tests and `mlxrt doctor` compare kernels by the same functions.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import platform
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ..cache.files import atomic_write, remove_partial_files
from .cpu.library import CpuKernels
from .dispatch import Gpu, Kernels
from .dtypes import DTYPES, HALVES
from .metal_source import shim
from .ops.attention_layout import PackedKV
from .registry import OPS, Case, Op

log = logging.getLogger("mlxrt")

QUICK_CASES = 3  # cases of an op that run before its first launch; `mlxrt doctor` runs all
CRASHED = "the process ended while this kernel was tested the last time"
LOCK_WAIT = 120.0  # seconds to wait for another process that tests a kernel


@dataclass(frozen=True)
class ErrorReport:
    """`error`: the largest difference, relative to the reference's largest value; inf for a NaN, a wrong shape or dtype."""

    error: float
    message: str

    def within(self, tolerance: float) -> bool:
        return self.error <= tolerance


@dataclass(frozen=True)
class SelfTestResult:
    """`error`: the largest over all cases, as a share of what the op's tolerance allows."""

    op: str
    dtype: str
    passed: bool
    error: float
    cases: int
    message: str = ""


def ops_with_kernels() -> dict[str, Op]:
    return {name: op for name, op in OPS.items() if op.launch is not None}


def list_cases(op: Op, dtype: str, large: bool = False) -> list[Case]:
    """An op's cases in order; `large`: also those too slow for a simulator. The global random state stays as it was."""
    state: Any = mx.random.state
    high, low = state[0].tolist()
    try:
        return [case for case in op.cases(DTYPES[dtype]) if large or not case.large]
    finally:
        mx.random.seed(high << 32 | low)  # a seed is the two uint32 of the state


def list_launched_cases(op: Op, dtype: str, large: bool) -> list[Case]:
    """The cases for which the kernel would be launched."""
    given = ((case, case.arguments()) for case in list_cases(op, dtype, large))
    return [case for case, arguments in given if not op.unsupported(**arguments) and op.is_faster(**arguments)]


def pick_cases(cases: list[Case], most: int | None) -> list[Case]:
    """At most `most` of them, from the first to the last."""
    if most is None or len(cases) <= most:
        return cases
    return [cases[round(i * (len(cases) - 1) / max(most - 1, 1))] for i in range(most)]


def to_float32(value: Any) -> Any:
    """Every float16 and bfloat16 in it as float32, also inside dataclasses such as QuantizedMatrix."""
    if isinstance(value, mx.array):
        return value.astype(mx.float32) if value.dtype in HALVES else value
    if isinstance(value, mx.Dtype):
        return mx.float32 if value in HALVES else value
    if isinstance(value, PackedKV):
        return value.to_float32()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: to_float32(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    if isinstance(value, (list, tuple)):
        return type(value)(map(to_float32, value))
    return {k: to_float32(v) for k, v in value.items()} if isinstance(value, dict) else value


def compute_reference(op: Op, case: Case) -> Any:
    """What the op should return, in float32."""
    with mx.stream(mx.cpu):  # a GPU's float32 products may round as TF32 does
        found = op.reference(**to_float32(case.arguments()))
        mx.eval(found)
    return found


def check_case(op: Op, case: Case, gpu: Gpu, expected: Any) -> ErrorReport:
    assert op.launch is not None
    return compare_outputs(op.launch(gpu, **case.arguments()), op.reference(**case.arguments()), expected)


def compare_outputs(got: Any, plain: Any, expected: Any) -> ErrorReport:
    """`plain` is the reference at the case's own dtype: it has the dtypes the outputs must have."""
    ours, types, right = (dict(flatten_outputs(x)) for x in (got, plain, expected))
    if ours.keys() != right.keys():
        return ErrorReport(float("inf"), f"outputs {sorted(ours)}, expected {sorted(right)}")
    worst = ErrorReport(0.0, "")
    for name, x in ours.items():
        label = f"output {name}" if name else "the output"
        if x.shape != right[name].shape or x.dtype != types[name].dtype:
            found, wanted = f"{x.shape} {x.dtype}", f"{right[name].shape} {types[name].dtype}"
            return ErrorReport(float("inf"), f"{label} is {found}, expected {wanted}")
        error = relative_error(x, right[name])
        if error > worst.error:
            worst = ErrorReport(error, f"{label} is off by {error:.3g} of its largest value")
    return worst


def flatten_outputs(x: Any) -> list[tuple[str, mx.array]]:
    found: Any = [("", x)] if isinstance(x, mx.array) else tree_flatten(split_packed(x))
    return found


def split_packed(x: Any) -> Any:
    """Quantized values beside their scales and biases: those must be equal, these may round differently."""
    if isinstance(x, PackedKV):
        return x.codec.unpack(x.words)
    return type(x)(map(split_packed, x)) if isinstance(x, (list, tuple)) else x


def relative_error(x: mx.array, right: mx.array) -> float:
    if x.size == 0:
        return 0.0
    if not mx.issubdtype(x.dtype, mx.floating):
        return 0.0 if mx.array_equal(x, right) else float("inf")
    x, right = x.astype(mx.float32), right.astype(mx.float32)
    # An expected infinity has to be one, and an expected NaN too.
    same = (mx.isinf(right) & (x == right)) | (mx.isnan(right) & mx.isnan(x))
    error = mx.where(same, 0.0, mx.abs(x - right)).max()
    largest = mx.where(mx.isfinite(right), mx.abs(right), 0.0).max()
    found = float(error / mx.maximum(largest, 1e-30))
    return found if found == found else float("inf")  # a NaN compares with nothing


def run_cases(op: Op, gpu: Gpu, dtype: str, most: int | None = None) -> SelfTestResult:
    """The kernel on its own cases, save those it would never be launched for."""
    tried, worst, allowed = 0, 0.0, op.tolerance[dtype]
    for case in pick_cases(list_launched_cases(op, dtype, large=most is None), most):
        tried += 1
        try:
            report = check_case(op, case, gpu, compute_reference(op, case))
        except (RuntimeError, ValueError) as error:  # MLX: source that does not compile or cannot be launched
            first = next(iter(str(error).strip().splitlines()), type(error).__name__)
            return SelfTestResult(op.name, dtype, False, float("inf"), tried, f"{case.name}: {first[:200]}")
        if not report.within(allowed):
            message = f"{case.name}: {report.message}, {allowed:.2g} allowed"
            return SelfTestResult(op.name, dtype, False, report.error / allowed, tried, message)
        worst = max(worst, report.error / allowed)
    return SelfTestResult(op.name, dtype, True, worst, tried)


def describe_machine(gpu: Gpu) -> dict[str, str]:
    """What a result holds for, besides the kernel's source."""
    info = mx.device_info()
    return {
        "backend": gpu.name,
        "device": str(info.get("device_name", "")),
        "architecture": str(info.get("architecture", "")),
        "system": f"{platform.system()} {platform.release()}",
        "mlx": version("mlx"),
    }


def source_digest(op: Op, gpu: Gpu) -> str:
    parts = [shim(gpu.name), *(p for s in op.sources for p in (s.name, *s.inputs, *s.outputs, s.helpers, s.body))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


class ResultFile:
    """The results of one machine. Lost or unreadable, the tests run again."""

    def __init__(self, folder: Path, gpu: Gpu):
        self.machine, self._gpu = describe_machine(gpu), gpu
        name = hashlib.sha256(json.dumps(self.machine, sort_keys=True).encode()).hexdigest()[:16]
        self.path = folder / f"{gpu.name}-{name}.json"
        self.results = self._read()

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        known = found.get("results") if isinstance(found, dict) and found.get("machine") == self.machine else None
        return known if isinstance(known, dict) else {}

    @contextlib.contextmanager
    def locked(self) -> Iterator[bool]:
        """One process and thread at a time, with what the others wrote. False where another did not end in time.

        The system releases the lock of a process that dies. So a mark of a test that is running means a crash to
        whoever holds the lock, and only to them. Where the file system has no locks, nobody waits.
        """
        with contextlib.ExitStack() as stack:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                remove_partial_files(self.path.parent)
                lock = stack.enter_context(open(self.path.with_suffix(".lock"), "a"))
                mine = wait_for_lock(lock)
            except OSError:
                mine = True
            self.results = self._read() or self.results
            yield mine

    def get(self, op: Op, dtype: str) -> SelfTestResult | None:
        found = self.results.get(self._key(op, dtype))
        try:
            return SelfTestResult(**found) if found else None
        except TypeError:  # spoiled, or of another version of this package
            return None

    def put(self, op: Op, result: SelfTestResult) -> None:
        self.results[self._key(op, result.dtype)] = asdict(result)
        self._write()

    def remove(self, op: Op, dtype: str) -> None:
        self.results.pop(self._key(op, dtype), None)
        self._write()

    def _key(self, op: Op, dtype: str) -> str:
        return f"{op.name} {dtype} {source_digest(op, self._gpu)}"

    def _write(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(self.path) as file:
                file.write(json.dumps({"machine": self.machine, "results": self.results}, indent=1).encode())
        except OSError as error:
            log.warning(f"cannot write kernel test results to {self.path}: {error.strerror or error}; they run again")


def wait_for_lock(lock: IO[str]) -> bool:
    """Take the lock; False if another holds it for too long."""
    import fcntl

    deadline = time.monotonic() + LOCK_WAIT
    waited = False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
        if not waited:
            log.info("another process is checking kernels on this machine; waiting for it")
        waited = True
        time.sleep(0.02)


def verify_on_first_use(kernels: Kernels, folder: Path) -> None:
    """Test each kernel before its first launch: a model uses a few of them, and compilers take their time."""
    kernels.self_test = lambda op, dtype: verify(kernels, [dtype], folder, ops=[op])


def verify(
    kernels: Kernels,
    dtypes: Iterable[str],
    folder: Path,
    most: int | None = QUICK_CASES,
    refresh: bool = False,
    ops: Iterable[Op] | None = None,
) -> list[SelfTestResult]:
    """Test the kernels of all ops, or of `ops`, and disable the wrong ones. Known results are taken from the file unless
    `refresh`."""
    gpu = kernels.gpu
    if gpu is None or kernels.mode == "reference":
        return []
    file = ResultFile(folder, gpu)
    wanted = [(op, dtype) for op in (ops_with_kernels().values() if ops is None else ops) for dtype in dtypes]
    unknown = [pair for pair in wanted if refresh or not is_result(file.get(*pair))]
    if any(refresh or file.get(*pair) is None for pair in unknown):
        what = f"{len(unknown)} kernels" if len(unknown) > 1 else f"the kernel of {unknown[0][0].name}"
        log.info(f"checking {what} on {file.machine['device'] or gpu.name}, once for this machine and MLX")
    for op, dtype in unknown:
        with file.locked() as mine:
            found = file.get(op, dtype)
            if refresh or found is None or not (mine or is_result(found)):
                run_self_test(file, op, gpu, dtype, most)
    results = [found for op, dtype in wanted if (found := file.get(op, dtype))]
    for result in results:
        if not result.passed and result.op not in kernels.disabled:
            kernels.disabled[result.op] = f"its kernel is wrong on this machine ({result.dtype}, {result.message})"
            log.warning(f"{result.op}: kernel disabled, plain MLX is used: {result.dtype}, {result.message}")
    return results


def is_result(found: SelfTestResult | None) -> bool:
    """Not so the mark of a test that has not ended: whether its process has, `ResultFile.locked` tells."""
    return found is not None and found.message != CRASHED


def run_self_test(file: ResultFile, op: Op, gpu: Gpu, dtype: str, most: int | None) -> None:
    """Records a failure first, so that a crash is remembered."""
    file.put(op, SelfTestResult(op.name, dtype, False, float("inf"), 0, CRASHED))
    found = None
    try:
        found = run_cases(op, gpu, dtype, most)
    finally:
        file.remove(op, dtype) if found is None else file.put(op, found)


def verify_cpu(kernels: Kernels) -> list[SelfTestResult]:
    """Test the ops that have kernels in C on all their cases, and disable the wrong ones. What a library computes was
    compared when it was compiled, too (cpu/build.py)."""
    cpu = kernels.cpu
    results = [] if cpu is None else [run_cpu_cases(op, cpu) for op in OPS.values() if op.cpu_launch is not None]
    for result in results:
        if not result.passed:
            kernels.disabled[result.op] = f"its CPU kernel is wrong on this machine ({result.message})"
    return results


def run_cpu_cases(op: Op, cpu: CpuKernels) -> SelfTestResult:
    assert op.cpu_launch is not None
    tried, worst, allowed = 0, 0.0, op.tolerance["float32"]
    for case in (*list_cases(op, "float32"), *op.cpu_cases()):
        if op.cpu_unsupported(**case.arguments()):
            continue
        tried += 1
        expected = compute_reference(op, case)
        report = compare_outputs(op.cpu_launch(cpu, **case.arguments()), expected, expected)
        if not report.within(allowed):
            message = f"{case.name}: {report.message}, {allowed:.2g} allowed"
            return SelfTestResult(op.name, "float32", False, report.error / allowed, tried, message)
        worst = max(worst, report.error / allowed)
    return SelfTestResult(op.name, "float32", True, worst, tried)
