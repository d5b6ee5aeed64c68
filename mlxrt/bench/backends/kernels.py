"""The ops of the kernel registry, one at a time: our kernel and plain MLX on the same arrays.

Setting: {}. Questions: list -> [{op, case, dtype, bytes}]; error {number} -> largest error of the kernel, and what is
allowed; time {number, which: kernel | plain} -> {seconds of one launch}. Several launches go into one graph, so that
the host's launch time is hidden as it is in a model.
"""

import dataclasses
import time
from typing import Any

import mlx.core as mx

from mlxrt import kernels
from mlxrt.bench.backends.serve import Served, serve
from mlxrt.errors import NoKernel
from mlxrt.kernels.selftest import check_case, compute_reference, list_cases
from mlxrt.weights.source.cache_dir import cache_root

LAUNCHES = 20  # launches of one timing


class KernelBackend(Served):
    def __init__(self, setting: dict[str, Any]):
        gpu = kernels.make_gpu(kernels.backend(), folder=cache_root() / "kernels")
        if gpu is None:
            raise NoKernel("there is no GPU here: every op runs as plain MLX, nothing to compare")
        self.gpu, self.backend = gpu, kernels.backend()
        self.todo: list[tuple[Any, Any, str]] = [
            (op, case, dtype)
            for op in kernels.OPS.values()
            for dtype in ("bfloat16", "float16")
            for case in list_cases(op, dtype, large=True)
            if op.launch is not None and not op.unsupported(**case.arguments())
        ]

    def info(self) -> dict[str, Any]:
        return {"engine": f"kernels on {self.backend}", "said": [], "cases": len(self.todo)}

    def list(self) -> list[dict[str, Any]]:
        return [
            {"op": op.name, "case": case.name, "dtype": dtype, "bytes": bytes_moved(op, case), "large": case.large}
            for op, case, dtype in self.todo
        ]

    def error(self, number: int) -> dict[str, float]:
        op, case, dtype = self.todo[number]
        found = check_case(op, case, self.gpu, compute_reference(op, case))
        return {"error": found.error, "allowed": op.tolerance[dtype]}

    def time(self, number: int, which: str) -> dict[str, float]:
        op, case, _ = self.todo[number]
        arguments = case.arguments()
        work = (lambda: op.launch(self.gpu, **arguments)) if which == "kernel" else (lambda: op.reference(**arguments))
        results = [leaves(work()) for _ in range(LAUNCHES)]
        start = time.perf_counter()
        mx.eval(results)
        mx.synchronize()
        return {"seconds": (time.perf_counter() - start) / LAUNCHES}


def leaves(value: Any) -> list:
    """Every array in an argument or a result."""
    if isinstance(value, mx.array):
        return [value]
    if isinstance(value, (tuple, list)):
        return [a for part in value for a in leaves(part)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [a for field in dataclasses.fields(value) for a in leaves(vars(value)[field.name])]
    return []


def bytes_moved(op: Any, case: Any) -> int:
    """Bytes of all inputs and outputs."""
    return sum(a.nbytes for a in [*leaves(list(case.arguments().values())), *leaves(op.reference(**case.arguments()))])


if __name__ == "__main__":
    serve(KernelBackend)
