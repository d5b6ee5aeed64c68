"""An op's own cases and a few more that only a test wants: values at which clamps and guards matter."""

from collections.abc import Callable, Iterator

import mlx.core as mx

from mlxrt.kernels import Case, Matrix, Op
from mlxrt.kernels.proof import DTYPES, cases_of


def all_cases(op: Op, dtype: str) -> list[Case]:
    mx.random.seed(11)
    return [*cases_of(op, dtype), *MORE.get(op.name, lambda _: iter(()))(DTYPES[dtype])]


def strong_gates(dtype: mx.Dtype) -> Iterator[Case]:
    """Gates and ups far outside [-7, 7], where activations saturate and an exp would overflow."""
    for activation, pair in (("gelu", False), ("clamped", True), ("silu", True)):
        rows, width = 40, 64
        weight = (mx.random.normal((rows * (1 + pair), width)) * 2.0).astype(dtype)
        arrays = {"x": mx.random.normal((2, width)).astype(dtype)}
        if not pair:
            arrays["times"] = mx.random.normal((2, rows)).astype(dtype)
        options = {"matrix": Matrix(weight), "activation": activation, "pair": pair}
        yield Case(f"strong {activation}", arrays, options)


MORE: dict[str, Callable[[mx.Dtype], Iterator[Case]]] = {"matvec": strong_gates}
