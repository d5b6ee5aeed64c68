"""Device time of a Gated DeltaNet layer's prefill by kernel, without MLX's host side.

    python -m bench.gpu.delta [--runs 1x512,1x2048,32x128] [--heads 16,32,128,128] [--set LANES=4,COLS=1]

Runs are rows x tokens; heads are key heads, value heads, key and value dimension (Qwen3.5 9B). A checkpoint is kept
every 64 tokens, as the engine does. `--set` changes constants of kernels/ops/gated_delta_prefill.py for this trial.
"""

import argparse

import mlxrt  # noqa: F401  before MLX

import mlx.core as mx  # isort: skip

from bench.gpu.clock import Clock
from bench.gpu.shapes import open_gpu
from mlxrt.kernels import PackedRows
from mlxrt.kernels.ops import gated_delta_prefill as op

STRIDE, WIDTH = 64, 4


def make_arguments(rows: int, tokens: int, heads: list[int]) -> dict:
    keys, values, key_dim, value_dim = heads
    channels = 2 * keys * key_dim + values * value_dim
    halves = {
        "projected": mx.random.normal((rows * tokens, channels + values * (value_dim + 2))),
        "conv_state": mx.zeros((rows, WIDTH - 1, channels)),
        "conv_weight": mx.random.normal((channels, WIDTH)),
        "norm": mx.ones(value_dim),
        "a_log": mx.zeros(values),
        "dt_bias": mx.zeros(values),
    }
    arrays = {name: x.astype(mx.bfloat16) for name, x in halves.items()}
    arrays["state"] = mx.zeros((rows, values, key_dim, value_dim))
    mx.eval(arrays)
    packed = PackedRows.pack([(tokens, range(STRIDE, tokens, STRIDE))] * rows)
    return {**arrays, "rows": packed, "eps": 1e-6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", default="1x512,1x2048,32x128")
    parser.add_argument("--heads", default="16,32,128,128")
    parser.add_argument("--set", default="", help="constants, such as LANES=4,COLS=1")
    args = parser.parse_args()
    for name, value in (one.split("=") for one in args.set.split(",") if one):
        if not hasattr(op, name):
            parser.error(f"gated_delta_prefill.py has no {name}")
        setattr(op, name, int(value))
    gpu = open_gpu()
    clock = Clock(gpu.library)
    for run in args.runs.split(","):
        rows, tokens = map(int, run.split("x"))
        given = make_arguments(rows, tokens, [int(n) for n in args.heads.split(",")])
        with gpu.library.recording() as launches:
            op.launch(gpu, **given)
        mx.eval([one.outputs for one in launches])
        times = {one.name[:-25]: clock.device_seconds([one]) for one in launches}
        parts = ", ".join(f"{name} {1e6 * t:.1f}" for name, t in times.items())
        print(f"{run}: {1e9 * sum(times.values()) / (rows * tokens):.0f} ns a token; us: {parts}", flush=True)


if __name__ == "__main__":
    main()
