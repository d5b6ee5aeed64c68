"""Peak rates of the device, measured: copying memory and multiplying matrices. No engine runs here.

Setting: {seconds, threads}. The answer is `info`.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import numpy as np

from mlxrt.bench.backends.serve import Served, serve
from mlxrt.kernels import device

COPY_BYTES = {"cpu": 1 << 26, "metal": 1 << 30, "cuda": 1 << 32}  # far beyond every cache
MATRIX_SIZE = {"cpu": 768, "metal": 4096, "cuda": 8192}


class PeakBackend(Served):
    def __init__(self, setting: dict[str, Any]):
        self.seconds, self.threads = setting.get("seconds", 2.0), setting.get("threads", 1)

    def info(self) -> dict[str, Any]:
        kind = device.backend()
        found = {"device": kind, "copy_bytes_per_s": self.copy_rate(COPY_BYTES[kind])}
        for dtype in ("float32",) if kind == "cpu" else ("bfloat16", "float16", "float32"):
            found[f"matmul_{dtype}_flops"] = self.matmul_rate(dtype, MATRIX_SIZE[kind])
        return found

    def copy_rate(self, size: int) -> float:
        """Bytes read and written a second. On a CPU with threads of our own: MLX copies with one thread."""
        if device.backend() == "cpu":
            return 2 * size * self.threads / self.best_time(self.parallel_copy(size))

        x = mx.zeros((size // 4,), mx.float32)
        mx.eval(x)
        return 2 * size / self.best_time(lambda: mx.eval(x + 1))

    def parallel_copy(self, size: int) -> Callable[[], Any]:
        pairs = [(np.zeros(size, np.uint8), np.ones(size, np.uint8)) for _ in range(self.threads)]
        pool = ThreadPoolExecutor(self.threads)
        return lambda: list(pool.map(lambda pair: np.copyto(*pair), pairs))

    def matmul_rate(self, dtype: str, n: int) -> float:
        a = mx.random.normal((n, n)).astype(getattr(mx, dtype))
        mx.eval(a)
        return 2 * n**3 / self.best_time(lambda: mx.eval(a @ a))

    def best_time(self, work: Callable[[], Any]) -> float:
        """Seconds of the best round: a peak is what the machine does when nothing else runs."""
        # One thread's CPU time is its wall time on a quiet machine, and leaves other processes out on a busy one.
        clock = time.process_time if self.threads == 1 and device.backend() == "cpu" else time.perf_counter
        work()  # first touch allocates pages
        best, end = float("inf"), time.perf_counter() + self.seconds
        while time.perf_counter() < end or best == float("inf"):
            began = clock()
            work()
            mx.synchronize()
            best = min(best, clock() - began)
        return best


if __name__ == "__main__":
    serve(PeakBackend)
