"""`mlxrt doctor`: describes this machine and compares every kernel with its reference on it. Needs no model."""

import argparse
import json
import platform
from typing import Any

from .flags import Parser
from .terminal import format_bytes, one_line

OK, MISMATCH = 0, 1
NAMES = {"memory_bytes": "memory", "free_bytes": "free memory"}


def add_flags(parser: Parser) -> None:
    parser.add_argument("--quick", action="store_true", help="run a few cases of each kernel, not all")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), help="only cases of this dtype")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from ..config import EngineConfig
    from ..engine.cpu_kernels import open_cpu_kernels
    from ..kernels import Kernels, backend, make_gpu
    from ..weights.source.cache_dir import cache_root
    from .inspect import inspect_machine

    gpu = make_gpu(backend(), folder=cache_root() / "kernels")
    kernels = Kernels("auto", gpu, open_cpu_kernels(EngineConfig()) if gpu is None else None)
    system = {"system": platform.platform(), "python": platform.python_version()}
    if kernels.cpu is not None:
        system["cpu kernels"] = f"{kernels.cpu.vectors}, {kernels.cpu.threads} threads ({kernels.cpu.path})"
    found = inspect_machine() | system | {"ops": check_ops(kernels, args.quick, args.dtype)}
    print(json.dumps(found, allow_nan=False) if args.json else "\n".join(map(one_line, format_report(found))))
    return MISMATCH if any(op["verdict"] == "disagrees" for op in found["ops"]) else OK


def check_ops(kernels: Any, quick: bool, dtype: str | None = None) -> list[dict[str, Any]]:
    """One row per op: what runs it here, how close the kernel is to the reference, and why it is not used."""
    from ..kernels import OPS
    from ..kernels.dtypes import DTYPES
    from ..kernels.selftest import QUICK_CASES, verify, verify_cpu
    from ..weights.source.cache_dir import cache_root

    folder = cache_root() / "kernels"
    if kernels.cpu is not None:
        results = verify_cpu(kernels) if dtype in (None, "float32") else []
    else:
        results = verify(kernels, [dtype] if dtype else DTYPES, folder, QUICK_CASES if quick else None, refresh=True)
    return [describe_op(name, op, kernels, [r for r in results if r.op == name]) for name, op in OPS.items()]


def describe_op(name: str, op: Any, kernels: Any, results: list[Any]) -> dict[str, Any]:
    runs, verdict, reason = "plain MLX", "not tried", "this device has no GPU that MLX can use"
    if kernels.gpu is not None or (results and op.cpu_launch is not None):
        if (op.launch if kernels.gpu is not None else op.cpu_launch) is None:
            reason = "the op has no kernel" if op.cpu_launch is None else "its kernels are for CPUs"
        elif name in kernels.disabled:
            verdict, reason = "disagrees", kernels.disabled[name]
        else:
            runs, verdict, reason = "kernel", "agrees", ""
    errors, cases = {r.dtype: finite_or_none(r.error) for r in results if r.cases}, sum(r.cases for r in results)
    return {"op": name, "runs": runs, "verdict": verdict, "cases": cases, "errors": errors, "reason": reason}


def finite_or_none(error: float) -> float | None:
    """JSON has no infinity: None is an error without a size, such as source that does not compile."""
    return error if error < float("inf") else None


def format_report(found: dict[str, Any]) -> list[str]:
    sizes = ("memory_bytes", "free_bytes")
    shown = {NAMES.get(key, key): format_bytes(v) if key in sizes else v for key, v in found.items() if key != "ops"}
    lines = [f"{key:<14} {value}" for key, value in shown.items()]
    if not any(op["cases"] for op in found["ops"]) and not any(op["verdict"] == "disagrees" for op in found["ops"]):
        reason = found["ops"][0]["reason"] if found["ops"] else "there is none"
        return [*lines, "", f"no kernel was tried: {reason}; {len(found['ops'])} ops run as plain MLX"]
    width = max((len(op["op"]) for op in found["ops"]), default=2)
    lines += ["", f"{'op':<{width}}  runs as    verdict    cases  error / tolerance"]
    tried, untried = split_tried(found["ops"])
    for op in tried:
        errors = ", ".join(f"{dtype} {'none' if e is None else f'{e:.0%}'}" for dtype, e in op["errors"].items())
        reason = f"  {op['reason']}" if op["reason"] else ""
        row = f"{op['op']:<{width}}  {op['runs']:<9}  {op['verdict']:<9}  {op['cases']:>5}  {errors}{reason}"
        lines.append(row.rstrip())
    disabled = [op["op"] for op in tried if op["verdict"] == "disagrees"]
    verdict = f"disabled here: {', '.join(disabled)}" if disabled else f"none of the {len(tried)} tried disagrees"
    skipped = [f"not tried, run as plain MLX: {len(ops)} ops ({reason})" for reason, ops in untried.items()]
    return [*lines, "", verdict, *skipped]


def split_tried(ops: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, list[str]]]:
    """The ops that were tried, and the names of the others by the reason."""
    untried: dict[str, list[str]] = {}
    for op in ops:
        if op["verdict"] == "not tried":
            untried.setdefault(op["reason"] or "no case", []).append(op["op"])
    return [op for op in ops if op["verdict"] != "not tried"], untried
