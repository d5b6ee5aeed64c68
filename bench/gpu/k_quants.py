"""Device time of matvecs with GGUF's K-quants beside affine 4 bit, without MLX's host side; and whether they are right.

    python -m bench.gpu.k_quants [--shape 12288x4096] [--rows 1] [--kinds affine,q4_k,q6_k] [--sweep]

A chain over 1 GB of distinct matrices as one CUDA graph, in bfloat16; for more than 64 rows, what dequantises them.
*share*: of copy bandwidth, which for one row is to be at least 60 % for q4_k and q6_k. Every kind is compared with
float32 products of the dequantised matrix; exit 1 if one is wrong. --sweep tries other ways to share the rows among
simdgroups.
"""

import argparse
import itertools
import math
import sys

import mlxrt  # noqa: F401  before MLX

import mlx.core as mx  # isort: skip
import numpy as np

from bench.gpu.clock import Clock
from bench.gpu.shapes import open_gpu
from bench.gpu.step import copy_bandwidth
from mlxrt.kernels import QuantizedMatrix, dequantize
from mlxrt.kernels.ops import qmm, qmv
from mlxrt.kernels.testing import sample

CHOSEN = qmv.tile_config
CHAIN_BYTES = 1e9  # more than any cache
KINDS = "affine,q4_k,q6_k,q5_k,q3_k,q2_k,iq4_xs,iq4_nl"
SWEEP = [
    {"R": r, "RESIDENT": resident, "LOOPS": loops}
    for r, resident, loops in itertools.product((1, 2, 4), (1, 2, 3), (1, 2, 4))
]


def make_matrix(kind: str, shape: tuple[int, int]) -> QuantizedMatrix:
    matrix = sample(kind if kind == "affine" else f"{kind}_split", shape, mx.bfloat16, 4, 64)
    mx.eval(matrix.inputs()[:3])
    return matrix


def matrix_bytes(matrix: QuantizedMatrix) -> int:
    return sum(a.nbytes for a in (matrix.weight, matrix.scales, matrix.biases) if a is not None)


def find_error(y: mx.array, x: mx.array, matrix: QuantizedMatrix) -> float:
    """Of the largest value."""
    right = np.array(matrix.plain())
    if x.shape[0] <= qmm.MAX_QMM_ROWS:
        right = np.array(x.astype(mx.float32)) @ right.T
    return float(np.abs(np.array(y.astype(mx.float32)) - right).max() / np.abs(right).max())


def record(gpu, x: mx.array, matrices: list[QuantizedMatrix]) -> list:
    op = qmv.qmv if x.shape[0] <= qmv.MAX_QMV_ROWS else qmm.qmm
    with gpu.library.recording() as launches:
        for matrix in matrices:
            if x.shape[0] > qmm.MAX_QMM_ROWS:
                dequantize.launch(gpu, matrix=matrix, dtype=x.dtype)
            else:
                op.launch(gpu, x=x, matrix=matrix)
    mx.eval([one.outputs for one in launches])
    return launches


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="12288x4096")
    parser.add_argument("--rows", type=int, default=1, help="of x")
    parser.add_argument("--kinds", default=KINDS)
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    rows, width = map(int, args.shape.split("x"))
    gpu, bandwidth, wrong = open_gpu(), copy_bandwidth(), 0
    clock = Clock(gpu.library)
    x = mx.random.normal((args.rows, width)).astype(mx.bfloat16)
    print(f"{rows} x {width}, {args.rows} rows of x, copy {bandwidth / 1e9:.0f} GB/s", flush=True)
    for kind in args.kinds.split(","):
        first = make_matrix(kind, (rows, width))
        size = matrix_bytes(first)
        matrices = [first, *(make_matrix(kind, (rows, width)) for _ in range(math.ceil(CHAIN_BYTES / size) - 1))]

        def measure(matrices=matrices, size=size) -> tuple[float, str]:
            launches = record(gpu, x, matrices)
            seconds = clock.device_seconds(launches) / len(launches)
            error = find_error(launches[0].outputs[0], x, matrices[0])
            share = size / seconds / bandwidth
            return error, f"{1e6 * seconds:7.2f} us, {size / 1e6:6.2f} MB, {share:4.0%} of copying, error {error:.1e}"

        error, line = measure()
        wrong += not error <= qmv.qmv.tolerance["bfloat16"]
        print(f"  {kind:8} {line}{'' if error <= qmv.qmv.tolerance['bfloat16'] else ' WRONG'}", flush=True)
        if args.sweep and args.rows <= qmv.MAX_QMV_ROWS:
            for change in SWEEP:
                qmv.tile_config = lambda *given, change=change: {**CHOSEN(*given), **change}
                print(f"           {change}: {measure()[1]}", flush=True)
            qmv.tile_config = CHOSEN
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
