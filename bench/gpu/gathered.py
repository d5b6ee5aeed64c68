"""Experts of plain weights for many tokens, which go through MLX's gather_mm: right on this machine?

    python -m bench.gpu.gathered

Against every expert's own product in float32. MLX 0.32.4's is wrong on CUDA in two cases that
mlxrt/kernels/ops/gather.py keeps from it; they are shown as well, so that one sees when they are mended. Exit 1 if ours
is wrong.
"""

import sys

import mlxrt  # noqa: F401  before MLX

import mlx.core as mx  # isort: skip

from mlxrt.kernels import Kernels, backend, make_gpu
from mlxrt.kernels.ops.gather import gather_mm
from mlxrt.models.moe import Experts
from mlxrt.weights.source.cache_dir import cache_root

HALF, NEAR = mx.bfloat16, 0.02


def said(name: str, got: mx.array, right: mx.array) -> bool:
    """Whether all rows are near the truth."""
    off, top = mx.abs(got.astype(mx.float32) - right).max(axis=-1), mx.abs(right).max().item()
    wrong = sum(not o < NEAR * top for o in off.tolist())
    print(f"{name}: {wrong} of {off.size} rows wrong, off by {off.max().item():.3g} of {top:.3g}", flush=True)
    return not wrong


def routed(tokens: int, count: int) -> mx.array:
    return mx.argsort(mx.random.uniform(shape=(tokens, count)), axis=-1)[:, :8].astype(mx.uint32)


def experts(tokens: int, count: int = 128, dim: int = 2048, hidden: int = 768) -> bool:
    made = Experts(count, dim, hidden)
    for name in ("gate_proj", "up_proj", "down_proj"):
        made[name].weight = made[name].weight.astype(HALF)
    made.kernels = Kernels("auto", make_gpu(backend(), folder=cache_root() / "kernels"), print)
    made.fuse()
    x, chosen = mx.random.normal((tokens, dim)).astype(HALF), routed(tokens, count)
    shares = mx.softmax(mx.random.normal(chosen.shape), axis=-1)
    right, each = mx.zeros((tokens, dim)), chosen.tolist()
    for e in range(count):
        pairs = [(n, c) for n in range(tokens) for c in range(8) if each[n][c] == e]
        if pairs:
            rows, columns = (mx.array(side) for side in zip(*pairs))
            y = x[rows].astype(mx.float32) @ made.gate_up_proj.weight[e].astype(mx.float32).T
            gate, up = mx.split(y, 2, axis=-1)
            y = (gate * mx.sigmoid(gate) * up) @ made.down_proj.weight[e].astype(mx.float32).T
            right = right.at[rows].add(y * shares[rows, columns][:, None])
    return said(f"{tokens} tokens through {count} experts", made(x, chosen, shares), right)


def stacks(count: int, outs: int, dim: int = 2048) -> bool:
    """MLX's own both ways, and ours."""
    weight, x = mx.random.uniform(-1, 1, (count, outs, dim)).astype(HALF), mx.random.normal((65, dim)).astype(HALF)
    chosen = routed(65, count).flatten()
    order = mx.argsort(chosen)
    ids, rows, stack = chosen[order], x[order // 8], weight.swapaxes(-1, -2)
    each = ids.tolist()
    where = [(e, each.index(e), each.count(e)) for e in sorted(set(each))]
    right = mx.concatenate([rows[a : a + n].astype(mx.float32) @ weight[e].astype(mx.float32).T for e, a, n in where])
    name = f"a stack of {weight.nbytes / 1e9:.1f} GB"
    fine = said(f"{name}, ours", gather_mm(rows[:, None], stack, ids, ordered=True)[:, 0], right)
    for how, given in (("x[i][:, None]", rows[:, None]), ("x[:, None][i]", x[:, None][order // 8])):
        said(f"{name}, MLX's of {how}", mx.gather_mm(given, stack, rhs_indices=ids, sorted_indices=True)[:, 0], right)
    return fine


def main() -> int:
    mx.random.seed(1)
    fine = [experts(65), experts(512), stacks(128, 1536), stacks(256, 3072)]
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main())
