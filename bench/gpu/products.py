"""Products of few rows with 4-bit matrices beside MLX's own.

    python -m bench.gpu.products [--shapes 4096x12288,24576x4096p] [--rows 8,16,32,64] [--bits 4]

us for one of a chain of distinct matrices, more of them than any cache holds: ours as part of a CUDA graph, as a decode
step runs them, and `mx.quantized_matmul` as MLX launches it; *ratio*: the second over the first. A `p` after a shape:
gates and ups with their activation. Every product is compared with MLX's; exit 1 where one is wrong.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable

import mlxrt  # noqa: F401  before MLX

import mlx.core as mx  # isort: skip

from bench.gpu.clock import Clock
from bench.gpu.shapes import open_gpu
from mlxrt.kernels import QuantizedMatrix
from mlxrt.kernels.ops import qmm
from mlxrt.kernels.ops.activation import activate
from mlxrt.kernels.testing import sample

# Qwen3 0.6B, 8B and 30B-A3B, gpt-oss 20B, Gemma 4 E2B, 26B-A4B and 31B, MiniMax M2
SHAPES = (
    "4096x1024,1024x2048,6144x1024p,1024x3072,6144x4096,4096x4096,24576x4096p,4096x12288,5120x2048,2048x4096,5120x2880,"
    "2880x4096,12288x1536p,1536x6144,1536x2048,4224x2816p,2816x2112,2816x4096,43008x5376p,5376x21504,3072x6144"
)
CHAIN_BYTES = 160e6  # more than any cache
MAX_ERROR = 3e-2  # of the largest number


def plain_product(x: mx.array, w: QuantizedMatrix, pair: bool) -> mx.array:
    y = mx.quantized_matmul(x, w.weight, w.scales, w.biases, True, w.group, w.bits)
    return activate("silu", *mx.split(y, 2, axis=-1)) if pair else y


def wall_seconds(make: Callable[[], list[mx.array]]) -> float:
    """Median seconds from launching to the end of all."""
    spent = []
    for _ in range(7):
        mx.synchronize()
        began = time.perf_counter()
        mx.eval(make())
        mx.synchronize()
        spent.append(time.perf_counter() - began)
    return statistics.median(spent[2:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--rows", default="8,16,32,64", help="of x")
    parser.add_argument("--bits", type=int, default=4)
    args = parser.parse_args()
    gpu, wrong, least = open_gpu(), 0, math.inf
    clock = Clock(gpu.library)
    for shape in args.shapes.split(","):
        pair = shape.endswith("p")
        rows, width = map(int, shape.rstrip("p").split("x"))
        after = {"activation": "silu", "pair": True} if pair else {}
        count = max(4, math.ceil(CHAIN_BYTES / (rows * width * args.bits / 8)))
        matrices = [sample("affine", (rows, width), mx.bfloat16, args.bits, 64) for _ in range(count)]
        mx.eval([w.inputs()[:3] for w in matrices])
        cells = []
        for m in map(int, args.rows.split(",")):
            x = mx.random.normal((m, width)).astype(mx.bfloat16)

            def theirs(x=x, matrices=matrices, pair=pair) -> list[mx.array]:
                return [plain_product(x, w, pair) for w in matrices]

            with gpu.library.recording() as launches:
                y = [qmm.launch(gpu, x=x, matrix=w, **after) for w in matrices]
            right = theirs()
            mx.eval(y, right, [one.outputs for one in launches])
            a, b = y[0].astype(mx.float32), right[0].astype(mx.float32)
            error = (mx.abs(a - b).max() / mx.abs(b).max()).item()
            wrong += not error < MAX_ERROR
            times = [1e6 * s / count for s in (clock.device_seconds(launches, 9), wall_seconds(theirs))]
            least = min(least, times[1] / times[0])
            cells.append(f"{times[0]:.1f} / {times[1]:.1f} ({times[1] / times[0]:.2f})")
            cells[-1] += "" if error < MAX_ERROR else f" WRONG {error:.1e}"
        print(f"| {shape} | {' | '.join(cells)} |", flush=True)
    print(f"least ratio {least:.2f}, {wrong} wrong", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
