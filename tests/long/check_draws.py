"""python -m tests.long.check_draws [--draws 20000] [--sets N] [--vocab 3000]: do draws follow their distribution?

For every set of parameters, tokens of many seeds and positions against probabilities that numpy computes in float64: by
the draw op's kernels on a GPU, by its reference elsewhere. Fails where chi-square's p is 1e-4 or less.
"""

import argparse
import sys

import mlx.core as mx
import numpy as np

from mlxrt.kernels import PLAIN, DrawPlan, DrawRow, Kernels, backend, draw, make_gpu, pack_rows
from mlxrt.weights.source.cache_dir import cache_root

from ..support.chi_square import p_value

TOP_K = [1, 2, 5, 20, 40, 64, 100, 256, 257, 300, 512]
TOP_P = [1e-9, 0.01, 0.3, 0.5, 0.8, 0.9, 0.95, 0.999, 0.999999]
MIXED = [(0.7, 20, 0.95, 0.0), (1.0, 64, 1.0, 0.05), (1.5, 300, 0.7, 0.01), (0.3, 0, 1.0, 0.2), (3.0, 0, 0.4, 0.1)]
ROWS = ("normal", "steps", "even", "peaked")


def make_logits(kind: str, vocab: int) -> np.ndarray:
    x = np.random.default_rng(vocab).normal(size=vocab).astype(np.float32) * 2
    if kind == "steps":
        x = np.round(x)  # many equal ones
    if kind == "even":
        x = np.zeros(vocab, np.float32)
    if kind == "peaked":
        x[vocab - 3] = x.max() + 3
    return x


def list_sets() -> list[tuple[str, DrawRow]]:
    rows = [DrawRow(1.0, top_k=k) for k in TOP_K] + [DrawRow(0.8, top_p=p) for p in TOP_P]
    rows += [DrawRow(t, top_k=k, top_p=p, min_p=m) for t, k, p, m in MIXED] + [DrawRow(t) for t in (0.1, 0.7, 1.0, 5.0)]
    found = [(ROWS[i % 2], row) for i, row in enumerate(rows)]  # every other one with ties
    found += [("even", DrawRow(1.0, top_k=7)), ("even", DrawRow(1.0, top_p=0.3)), ("even", DrawRow(1.0))]
    found += [("peaked", DrawRow(1.0)), ("peaked", DrawRow(0.9, 50, 0.9)), ("peaked", DrawRow(2.0, min_p=0.1))]
    return found


def find_probabilities(x: np.ndarray, row: DrawRow) -> np.ndarray:
    """From the best token down, in float64; of equal tokens those with lower ids come first."""
    y = x.astype(np.float64) / row.temperature
    order = np.argsort(-y, kind="stable")
    if row.top_k:
        order = order[y[order] >= y[order[min(row.top_k, len(y)) - 1]]]
    p = np.exp(y[order] - y.max())
    before = np.cumsum(p) - p
    stays = (before < row.top_p * p.sum() - 1e-9) | (np.arange(len(p)) == 0) if row.top_p < 1 else np.full(len(p), True)
    stays &= p >= row.min_p * (1 - 1e-7)
    found = np.zeros(len(x))
    found[order[stays]] = p[stays]
    return found / found.sum()


def count_draws(x: np.ndarray, row: DrawRow, draws: int, kernels: Kernels, width: int = 250) -> np.ndarray:
    counts = np.zeros(len(x), np.int64)
    logits, plan = mx.array(np.tile(x, (width, 1))), DrawPlan.of([row], len(x))
    for start in range(0, draws, width):
        rows = [replace_seed(row, (start + i) // 20 * 7919, (start + i) % 20) for i in range(width)]
        tokens = kernels.run(draw, x=logits, rows=pack_rows(rows), offset=mx.zeros((1,), mx.uint32), plan=plan)[0]
        counts += np.bincount(np.array(tokens), minlength=len(x))
    return counts


def replace_seed(row: DrawRow, seed: int, position: int) -> DrawRow:
    return DrawRow(row.temperature, row.top_k, row.top_p, row.min_p, seed, position)


def check_set(kind: str, row: DrawRow, draws: int, vocab: int, kernels: Kernels = PLAIN) -> float:
    """p of the draws."""
    x = make_logits(kind, vocab)
    return p_value(count_draws(x, row, draws, kernels), find_probabilities(x, row))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.long.check_draws", description=__doc__)
    parser.add_argument("--draws", type=int, default=20_000)
    parser.add_argument("--sets", type=int, help="only the first N")
    parser.add_argument("--vocab", type=int, default=3000)
    args = parser.parse_args(argv)
    gpu = make_gpu(backend(), folder=cache_root() / "kernels")
    kernels = Kernels("strict", gpu) if gpu is not None else PLAIN
    bad, sets = 0, list_sets()[: args.sets]
    for kind, row in sets:
        p = check_set(kind, row, args.draws, args.vocab, kernels)
        bad += p <= 1e-4
        what = f"temperature {row.temperature}, top_k {row.top_k}, top_p {row.top_p}, min_p {row.min_p}"
        print(f"{'BAD ' if p <= 1e-4 else ''}p {p:.4f}  {kind:7} {what}", flush=True)
    print(f"{len(sets)} sets of {args.draws} draws by {'kernels' if gpu is not None else 'the reference'}, {bad} bad")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
