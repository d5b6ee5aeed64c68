"""Every op of the kernel registry on this machine's GPU: right, and how fast beside MLX's own.

    python -m bench.gpu.ops [--json FILE] [--only OP,OP] [--no-speed] [--turn FILE]

Right: each case and dtype against the reference in float32. Fast: products chained over distinct matrices of a gigabyte
or more together, so that nothing comes from a cache, launches included: ours as one graph, as a greedy step is,
and launched by MLX, as other steps are; MLX's own.
"""

import argparse
import json
import time
from functools import reduce

import mlxrt  # noqa: F401  before MLX

import mlx.core as mx  # isort: skip

from bench.gpu.clock import Clock
from bench.gpu.turn import turn
from mlxrt.kernels import OPS, QuantizedMatrix, backend, make_gpu, qmm, qmv
from mlxrt.kernels.error_report import DTYPES, cases_of, prove, truth
from mlxrt.kernels.ops.qmv import FEW
from mlxrt.weights.source.cache_dir import cache_root

SHAPES = ((12288, 4096), (151936, 4096), (6144, 4096), (4096, 4096), (4096, 12288), (1024, 2048), (151936, 1024))
WAYS = "as a graph", "launched by MLX", "MLX's own"


def check(gpu, names):
    """(op, case, dtype, what) of everything that is wrong, and how many were right."""
    wrong, right = [], 0
    for name in names:
        op = OPS[name]
        for dtype in DTYPES:
            for case in cases_of(op, dtype, large=True):
                if op.unsupported(**case.arguments()):
                    continue
                try:
                    proof = prove(op, case, gpu, truth(op, case))
                except (RuntimeError, ValueError) as bad:
                    wrong.append((name, case.name, dtype, str(bad)[:1500]))
                    continue
                if proof.holds(op.tolerance[dtype]):
                    right += 1
                else:
                    wrong.append((name, case.name, dtype, proof.told))
    return wrong, right


def copy_bandwidth():
    x = mx.random.normal((1 << 28,))
    mx.eval(x)
    best = 0.0
    for _ in range(5):
        began = time.perf_counter()
        mx.eval(x + 1)
        best = max(best, 2 * x.nbytes / (time.perf_counter() - began))
    return best


def weights(gpu, rows, width, bits, group=64):
    """As a model holds them: in one buffer."""
    words = mx.random.randint(0, 1 << 31, (rows, width * bits // 32)).astype(mx.uint32)
    scales = mx.random.uniform(0.01, 0.02, (rows, width // group)).astype(mx.bfloat16)
    return QuantizedMatrix(*gpu.bundle([words, scales, -8 * scales]), bits, group, "affine")


def nbytes(m):
    return m.weight.nbytes + m.scales.nbytes + m.biases.nbytes


def chain(gpu, rows, width, bits, n, size=1.1e9):
    """Seconds a product in a chain over distinct matrices, each plus the last, and its bytes.

    Ours as one graph (None without a compiler), ours launched by MLX, MLX's own.
    """
    one = weights(gpu, rows, width, bits)
    many = [one] + [weights(gpu, rows, width, bits) for _ in range(min(200, max(1, int(size / nbytes(one)))))]
    x, start = mx.random.normal((n, width)).astype(mx.bfloat16), mx.zeros((n, rows), mx.bfloat16)
    op = qmv if n <= FEW else qmm

    def run(product):
        def chained(y):
            for m in many:
                y = product(m, y)
            return y

        step = mx.compile(chained)  # as a decode step is
        mx.eval(step(start))
        spent = []
        for _ in range(5):
            y = step(start)
            began = time.perf_counter()
            mx.eval(y)
            spent.append(time.perf_counter() - began)
        return min(spent) / len(many)

    def ours(m, y):
        return op.launch(gpu, x=x, matrix=m, residual=y)

    graph = None
    if gpu.library is not None:
        with gpu.library.recording() as launches:
            mx.eval(reduce(lambda y, m: ours(m, y), many, start))
        graph = Clock(gpu.library).waited(launches) / len(launches)
    return graph, run(ours), run(lambda m, y: m.multiply(x) + y), nbytes(one)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--only", default=",".join(OPS), help="ops to check")
    parser.add_argument("--no-speed", action="store_true")
    parser.add_argument("--rows", default="1,8,32", help="of x, in the speed part")
    parser.add_argument("--turn", help="measure while holding a lock on this file")
    args = parser.parse_args()
    gpu = make_gpu(backend(), folder=cache_root() / "kernels")
    assert gpu is not None, "no GPU here"
    wrong, right = check(gpu, [name for name in args.only.split(",") if name])
    print(f"{right} cases right, {len(wrong)} wrong", flush=True)
    for line in wrong:
        print("  WRONG", *line, flush=True)
    if args.no_speed:
        return 1 if wrong else 0
    if args.turn:
        for shape in SHAPES:
            for n in map(int, args.rows.split(",")):
                chain(gpu, *shape, 4, n, size=0)
    with turn(args.turn):
        rows, roof = speeds(gpu, [int(n) for n in args.rows.split(",")])
    if args.json:
        with open(args.json, "w") as f:
            json.dump(dict(wrong=wrong, right=right, copy=roof, rows=rows), f, indent=1)
    return 1 if wrong else 0


def speeds(gpu, counts):
    roof = copy_bandwidth()
    print(f"copy bandwidth {roof / 1e9:.0f} GB/s; us a product, share of that bandwidth", flush=True)
    rows = []
    for shape in SHAPES:
        for n in counts:
            *spent, size = chain(gpu, *shape, 4, n)
            us = [None if s is None else s * 1e6 for s in spent]
            rows.append(dict(shape=shape, n=n, graph_us=us[0], ours_us=us[1], mlx_us=us[2], bytes=size))
            told = [f"{name} {at:.1f} us ({size / at * 1e6 / roof:.0%})" for name, at in zip(WAYS, us) if at]
            print(f"{shape} 4 bit, {n} rows: {', '.join(told)}", flush=True)
    return rows, roof


if __name__ == "__main__":
    raise SystemExit(main())
