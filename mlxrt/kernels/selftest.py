"""Whether this machine computes our kernels rightly: asked before an op's first launch, once per device, system, MLX
and text, then remembered.

A GPU's compiler is not ours to trust, and most machines are none we have seen. A kernel that disagrees with its op's
meaning, does not compile, or took the process down while it was tried is disabled with a printed line; plain MLX
computes the op instead. Knows no model.
"""

import hashlib
import json
import logging
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..cache.files import atomic_write
from .dispatch import Gpu, Kernels
from .error_report import cases_of, prove, truth, with_kernels
from .metal_source import shim
from .registry import Case, Op

log = logging.getLogger("mlxrt")

FEW = 3  # cases of an op tried at a load; `mlxrt doctor` tries all
CRASHED = "the process ended while this kernel was tried the last time"


@dataclass(frozen=True)
class Verdict:
    """`error`: the largest over all cases, as a share of what the op's tolerance allows."""

    op: str
    dtype: str
    agrees: bool
    error: float
    cases: int
    told: str = ""


def machine(gpu: Gpu) -> dict[str, str]:
    """What a verdict holds for, besides the text."""
    info = mx.device_info()
    return {
        "backend": gpu.name,
        "device": str(info.get("device_name", "")),
        "architecture": str(info.get("architecture", "")),
        "system": f"{platform.system()} {platform.release()}",
        "mlx": version("mlx"),
    }


def text_digest(op: Op, gpu: Gpu) -> str:
    parts = [
        shim(gpu.name),
        *(part for s in op.sources for part in (s.name, *s.inputs, *s.outputs, s.helpers, s.body)),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def spread(cases: list[Case], most: int | None) -> list[Case]:
    """At most `most` of them, from the first to the last."""
    if most is None or len(cases) <= most:
        return cases
    return [cases[round(i * (len(cases) - 1) / max(most - 1, 1))] for i in range(most)]


def launched(op: Op, dtype: str, large: bool) -> list[Case]:
    """The cases for which the kernel would be launched."""
    given = ((case, case.arguments()) for case in cases_of(op, dtype, large))
    return [case for case, arguments in given if not op.unsupported(**arguments) and op.is_faster(**arguments)]


def examine(op: Op, gpu: Gpu, dtype: str, most: int | None = None) -> Verdict:
    """Try the kernel on its own cases, save those it would never be launched for."""
    tried, worst, allowed = 0, 0.0, op.tolerance[dtype]
    for case in spread(launched(op, dtype, large=most is None), most):
        tried += 1
        try:
            proof = prove(op, case, gpu, truth(op, case))
        except (RuntimeError, ValueError) as error:  # how MLX says that a text does not compile or cannot be launched
            first = next(iter(str(error).strip().splitlines()), type(error).__name__)
            return Verdict(op.name, dtype, False, float("inf"), tried, f"{case.name}: {first[:200]}")
        if not proof.holds(allowed):
            told = f"{case.name}: {proof.told}, {allowed:.2g} allowed"
            return Verdict(op.name, dtype, False, proof.error / allowed, tried, told)
        worst = max(worst, proof.error / allowed)
    return Verdict(op.name, dtype, True, worst, tried)


def verify_on_first_use(kernels: Kernels, folder: Path) -> None:
    """Ask about each kernel before its first launch: a model uses a few of them, and compilers take their time."""
    kernels.judge = lambda op, dtype: verify(kernels, [dtype], folder, ops=[op])


class Record:
    """The verdicts of one machine, in a file. Lost or unreadable, they are asked for again."""

    def __init__(self, folder: Path, gpu: Gpu):
        where = machine(gpu)
        name = hashlib.sha256(json.dumps(where, sort_keys=True).encode()).hexdigest()[:16]
        self.path = folder / f"{gpu.name}-{name}.json"
        self.where = where
        self.verdicts = self._read()

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        known = found.get("verdicts") if isinstance(found, dict) and found.get("machine") == self.where else None
        return known if isinstance(known, dict) else {}

    def find(self, op: Op, gpu: Gpu, dtype: str) -> Verdict | None:
        found = self.verdicts.get(self._key(op, gpu, dtype))
        try:
            return Verdict(**found) if found else None
        except TypeError:  # written by another version of this file
            return None

    def keep(self, op: Op, gpu: Gpu, verdict: Verdict) -> None:
        self.verdicts[self._key(op, gpu, verdict.dtype)] = asdict(verdict)

    def forget(self, op: Op, gpu: Gpu, dtype: str) -> None:
        self.verdicts.pop(self._key(op, gpu, dtype), None)

    @staticmethod
    def _key(op: Op, gpu: Gpu, dtype: str) -> str:
        return f"{op.name} {dtype} {text_digest(op, gpu)}"

    def write(self) -> None:
        """The whole file or the old one: another process may read it at any time."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(self.path) as out:
            out.write(json.dumps({"machine": self.where, "verdicts": self.verdicts}, indent=1).encode())


def verify(
    kernels: Kernels,
    dtypes: Iterable[str],
    folder: Path,
    most: int | None = FEW,
    anew: bool = False,
    ops: Iterable[Op] | None = None,
) -> list[Verdict]:
    """Disable what disagrees on this machine, of all ops or of these. Answers come from the record where it has them;
    `anew` asks again."""
    gpu = kernels.gpu
    if gpu is None or kernels.mode == "reference":
        return []
    record = Record(folder, gpu)
    todo = [(op, dtype) for op in (with_kernels().values() if ops is None else ops) for dtype in dtypes]
    unknown = [pair for pair in todo if anew or record.find(pair[0], gpu, pair[1]) is None]
    if unknown:
        what = f"{len(unknown)} kernels" if len(unknown) > 1 else f"the kernel of {unknown[0][0].name}"
        log.info(f"checking {what} on {record.where['device'] or gpu.name}, once for this machine and MLX")
    for op, dtype in unknown:
        try_out(record, op, gpu, dtype, most)
    verdicts = [found for op, dtype in todo if (found := record.find(op, gpu, dtype))]
    for verdict in verdicts:
        if not verdict.agrees and verdict.op not in kernels.disabled:
            kernels.disabled[verdict.op] = f"its kernel is wrong on this machine ({verdict.dtype}, {verdict.told})"
            log.warning(f"{verdict.op}: kernel disabled, plain MLX is used: {verdict.dtype}, {verdict.told}")
    return verdicts


def try_out(record: Record, op: Op, gpu: Gpu, dtype: str, most: int | None) -> None:
    """The worst is written down before it can happen: a crash leaves it in the file."""
    record.keep(op, gpu, Verdict(op.name, dtype, False, float("inf"), 0, CRASHED))
    store(record)
    found = None
    try:
        found = examine(op, gpu, dtype, most)
    finally:
        record.forget(op, gpu, dtype) if found is None else record.keep(op, gpu, found)
        store(record)


def store(record: Record) -> None:
    try:
        record.write()
    except OSError as error:
        log.warning(
            f"cannot remember kernel verdicts in {record.path}: {error.strerror or error}; they are asked for again"
        )
