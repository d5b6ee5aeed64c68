"""`mlxrt doctor`: what this machine is, and whether it computes our kernels rightly. Needs no model.

The first person with a new kind of machine gets the whole report from one command.
"""

import argparse
import json
import platform
from typing import Any

from .flags import Parser
from .terminal import amount, one_line

FINE, WRONG = 0, 1


def add_flags(parser: Parser) -> None:
    parser.add_argument("--quick", action="store_true", help="try a few cases of each kernel, not all of them")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), help="only what computes in this type")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from ..kernels import Kernels, backend, gpu_of
    from ..weights.source.cache_dir import cache_root
    from .machine import machine

    kernels = Kernels("auto", gpu_of(backend(), folder=cache_root() / "kernels"))
    system = {"system": platform.platform(), "python": platform.python_version()}
    found = machine() | system | {"ops": report(kernels, args.quick, args.dtype)}
    print(json.dumps(found, allow_nan=False) if args.json else "\n".join(one_line(line) for line in lines(found)))
    return WRONG if any(op["verdict"] == "disagrees" for op in found["ops"]) else FINE


def report(kernels: Any, quick: bool, dtype: str | None = None) -> list[dict[str, Any]]:
    """One entry per op: what computes it here, how near the kernel is to the op's meaning, why where it is not used."""
    from ..kernels import OPS
    from ..kernels.error_report import DTYPES
    from ..kernels.selftest import FEW, verify
    from ..weights.source.cache_dir import cache_root

    folder = cache_root() / "kernels"
    verdicts = verify(kernels, [dtype] if dtype else DTYPES, folder, FEW if quick else None, anew=True)
    return [entry(name, op, kernels, [v for v in verdicts if v.op == name]) for name, op in OPS.items()]


def entry(name: str, op: Any, kernels: Any, verdicts: list[Any]) -> dict[str, Any]:
    errors = {v.dtype: share(v.error) for v in verdicts if v.cases}
    found = {
        "op": name,
        "runs": "kernel",
        "verdict": "agrees",
        "cases": sum(v.cases for v in verdicts),
        "errors": errors,
    }
    if kernels.gpu is None:
        return found | {
            "runs": "plain MLX",
            "verdict": "not tried",
            "reason": "this device has no GPU that MLX can use",
        }
    if op.launch is None:
        return found | {"runs": "plain MLX", "verdict": "not tried", "reason": "the op has no kernel"}
    if name in kernels.disabled:
        return found | {"runs": "plain MLX", "verdict": "disagrees", "reason": kernels.disabled[name]}
    return found | {"reason": ""}


def share(error: float) -> float | None:
    """JSON has no infinity: None is an error without a size, such as a text that does not compile."""
    return error if error < float("inf") else None


def lines(found: dict[str, Any]) -> list[str]:
    sizes = ("memory_bytes", "free_bytes")
    told = [f"{key:<14} {amount(v) if key in sizes else v}" for key, v in found.items() if key != "ops"]
    width = max((len(op["op"]) for op in found["ops"]), default=2)
    told += ["", f"{'op':<{width}}  runs as    verdict    cases  error, as a share of what its tolerance allows"]
    for op in found["ops"]:
        errors = ", ".join(f"{dtype} {'none' if e is None else f'{e:.0%}'}" for dtype, e in op["errors"].items())
        reason = f"  {op['reason']}" if op["reason"] else ""
        told.append(
            f"{op['op']:<{width}}  {op['runs']:<9}  {op['verdict']:<9}  {op['cases']:>5}  {errors}{reason}".rstrip()
        )
    wrong = [op["op"] for op in found["ops"] if op["verdict"] == "disagrees"]
    return [*told, "", f"disabled here: {', '.join(wrong)}" if wrong else "nothing disagrees"]
