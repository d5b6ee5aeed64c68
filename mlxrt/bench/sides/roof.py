"""What the device can do at most, measured: copying memory and multiplying matrices. No engine runs here.

Setting: {seconds, threads}. It answers once, with the figures.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlxrt  # noqa: F401  its BLAS under MLX
from mlxrt.bench.sides.serving import serve
from mlxrt.kernels import device

COPIED = {"cpu": 1 << 26, "metal": 1 << 30, "cuda": 1 << 32}  # bytes: far beyond every cache
SIDE = {"cpu": 768, "metal": 4096, "cuda": 8192}  # of the matrices


class Roof:
    def __init__(self, setting: dict[str, Any]):
        self.seconds, self.threads = setting.get("seconds", 2.0), setting.get("threads", 1)

    def told(self) -> dict[str, Any]:
        kind = device.kind()
        found = {"device": kind, "copy_bytes_per_s": self.copied(COPIED[kind])}
        for dtype in ("float32",) if kind == "cpu" else ("bfloat16", "float16", "float32"):
            found[f"matmul_{dtype}_flops"] = self.multiplied(dtype, SIDE[kind])
        return found

    def reply(self, question: dict[str, Any]) -> Any:
        return self.told()

    def copied(self, size: int) -> float:
        """Bytes read and bytes written, a second. MLX copies with one thread on a CPU, and matmuls read with all."""
        import mlx.core as mx

        if device.kind() == "cpu":
            return 2 * size * self.threads / self.fastest(self.copying(size))

        x = mx.zeros((size // 4,), mx.float32)
        mx.eval(x)
        return 2 * size / self.fastest(lambda: mx.eval(x + 1))

    def copying(self, size: int) -> Callable[[], Any]:
        import numpy as np

        pairs = [(np.zeros(size, np.uint8), np.ones(size, np.uint8)) for _ in range(self.threads)]
        pool = ThreadPoolExecutor(self.threads)
        return lambda: list(pool.map(lambda pair: np.copyto(*pair), pairs))

    def multiplied(self, dtype: str, n: int) -> float:
        import mlx.core as mx

        a = mx.random.normal((n, n)).astype(getattr(mx, dtype))
        mx.eval(a)
        return 2 * n**3 / self.fastest(lambda: mx.eval(a @ a))

    def fastest(self, work: Callable[[], Any]) -> float:
        """A roof is what the machine does when nothing else runs: the best round counts."""
        import mlx.core as mx

        # One thread's processor time is its wall time on a quiet machine, and does not count the others on a busy one.
        clock = time.process_time if self.threads == 1 and device.kind() == "cpu" else time.perf_counter
        work()  # pages are given when they are first touched
        best, end = float("inf"), time.perf_counter() + self.seconds
        while time.perf_counter() < end or best == float("inf"):
            began = clock()
            work()
            mx.synchronize()
            best = min(best, clock() - began)
        return best


if __name__ == "__main__":
    serve(Roof)
