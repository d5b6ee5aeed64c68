"""Whether MLX still has a defect that mlxrt goes round (mlxrt/kernels/mlx_defects.py): in a process of its own.

    python -m tests.gpu.check_defect NAME

Prints `there` or `mended`. A defect may crash the process instead.
"""

import sys

import mlx.core as mx


def strided_scan() -> bool:
    """60 sums over an axis of one number whose stride is 512; the numbers beside it must stay."""
    wrong = 0
    for k in range(60):
        x = mx.random.uniform(shape=(1, 1, 512), key=mx.random.key(k))
        beside = mx.ones((1 << 18,))
        mx.eval(x, beside)
        last = mx.cumsum(x, axis=-1)[..., -1]  # [1, 1], strides of 512
        total = mx.cumsum(last, axis=-1)
        mx.eval(total)
        wrong += not mx.allclose(total[0, 0], x.sum()).item() or not (beside == 1).all().item()
    return wrong > 0


def rope_threads() -> bool:
    x, at = mx.random.normal((256, 8, 1, 16)), mx.arange(256)
    mx.eval(mx.fast.rope(x, 16, traditional=False, base=1e4, scale=1.0, offset=at))
    return False


def sorted_gather_mm(outs: int = 64, count: int = 16, dim: int = 128) -> bool:
    """Rows of x[i][:, None], whose axis of one has another stride than MLX takes it to have."""
    weight = mx.random.normal((count, outs, dim)).astype(mx.bfloat16)
    x, ids = mx.random.normal((65, dim)).astype(mx.bfloat16), mx.sort(mx.random.randint(0, count, (520,)))
    ids, rows = ids.astype(mx.uint32), x[mx.arange(520) // 8]
    stack = weight.swapaxes(-1, -2)
    theirs = mx.gather_mm(rows[:, None], stack, rhs_indices=ids, sorted_indices=True)[:, 0]
    with mx.stream(mx.cpu):
        each = weight.astype(mx.float32)[ids]
        right = (each @ rows.astype(mx.float32)[:, :, None])[:, :, 0]
        mx.eval(right)
    return not (mx.abs(theirs.astype(mx.float32) - right).max() < 0.02 * mx.abs(right).max()).item()


def large_gather_mm() -> bool:
    """A stack above 2 GB."""
    return sorted_gather_mm(3072, 256, 2048)


def tf32() -> bool:
    x = mx.full((64, 64), 1 + 2.0**-14)
    return not mx.all(x @ mx.eye(64) == x).item()


CHECKS = {f.__name__: f for f in (strided_scan, rope_threads, sorted_gather_mm, large_gather_mm, tf32)}


if __name__ == "__main__":
    print("there" if CHECKS[sys.argv[1]]() else "mended", flush=True)
