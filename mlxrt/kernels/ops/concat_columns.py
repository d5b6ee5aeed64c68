"""The columns of several products side by side, of matrices that are stored in different formats and so are not merged.

A kernel of its own because a step with one of MLX's ops in it cannot be captured as a graph, nor recorded on a CPU, and
because half of the layers of a Q4_K_M file have values of another type than keys.
"""

import math
from collections.abc import Iterator

import mlx.core as mx

from ..registry import Case, KernelSource, op
from .qmm import MAX_QMM_ROWS

THREADS = 256
CONCAT_COLUMNS = KernelSource("concat_columns.metal", ("a", "b", "c", "d"), ("y",))


FEW_ROWS = ((1, (40, 24)), (3, (96, 32, 33)), (2, (200, 64, 3, 5)), (5, (1, 1)))
MANY_ROWS = ((70, (48, 16, 16)), (65, (7, 9)), (128, (1, 2, 3, 4)), (300, (33, 1)))


def concat_cases(dtype: mx.Dtype, sizes=FEW_ROWS) -> Iterator[Case]:
    for rows, widths in sizes:
        mx.random.seed(rows)
        arrays = {name: mx.random.normal((rows, width)).astype(dtype) for name, width in zip("abcd", widths)}
        yield Case(f"{rows} rows of {list(widths)}", arrays)


@op(concat_cases, dict.fromkeys(("float32", "float16", "bfloat16"), 1e-9))  # nothing is computed
def concat_columns(a, b, c=None, d=None):
    """[N, A], [N, B] ... -> [N, A + B ...]."""
    return mx.concatenate([part for part in (a, b, c, d) if part is not None], axis=-1)


def unsupported(a, b, c=None, d=None) -> str | None:
    kinds = {part.dtype for part in (a, b, c, d) if part is not None}
    return f"products in {', '.join(sorted(map(str, kinds)))}" if len(kinds) > 1 else None


@concat_columns.kernel(CONCAT_COLUMNS, unsupported=unsupported, is_faster=lambda a, **rest: a.shape[0] <= MAX_QMM_ROWS)
def launch(gpu, a, b, c=None, d=None):
    rows, widths = a.shape[0], [0 if part is None else part.shape[1] for part in (a, b, c, d)]
    groups = math.ceil(rows * sum(widths) / THREADS)
    constants = {"THREADS": THREADS, "N": rows, **dict(zip("ABCD", widths))}
    return gpu(CONCAT_COLUMNS, [a, b, c, d], groups, THREADS, [((rows, sum(widths)), a.dtype)], **constants)[0]


def cpu_unsupported(**parts) -> str | None:
    other = {str(part.dtype) for part in parts.values() if part is not None} - {"mlx.core.float32"}
    return f"products in {', '.join(sorted(other))}" if other else None


@concat_columns.cpu_kernel(unsupported=cpu_unsupported, cases=lambda: concat_cases(mx.float32, MANY_ROWS))
def launch_cpu(cpu, **parts):
    return cpu.concat_columns(**parts)
