"""RMSNorm; of a branch that is normed on its way out: residual + RMSNorm(x), times a scalar, in one launch."""

import math
from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from ..registry import Case, KernelSource, op
from .qmv import bits_of

MAX_NUMBERS = 1 << 19  # up to which one launch is faster than several, however many rows they are
MAX_THREADS = 512  # eight numbers each are a row of 4096
ADD_NORM = KernelSource("add_norm.metal", ("x", "norm_weight", "residual", "scalar"), ("y",))


def add_norm_cases(dtype: mx.Dtype) -> Iterator[Case]:
    scalars = [(1, 64, None), (3, 1000, mx.array([0.7]).astype(dtype)), (2, 257, 0.7071), (5, 96, None)]
    scalars += [(6, 64, 0.5), (2, 4104, None), (1, 2051, 0.5)]  # several turns, of eights and of single numbers
    for rows, width, scalar in scalars:
        mx.random.seed(width)
        names = ("x", "residual") if rows != 5 else ("x",)
        arrays = {name: mx.random.normal((rows, width)).astype(dtype) for name in names}
        arrays["weight"] = mx.random.normal((width,)).astype(dtype)
        options: dict[str, Any] = {"eps": 1e-6}
        if isinstance(scalar, mx.array):
            arrays["scalar"] = scalar
        else:
            options["scalar"] = scalar
        if rows == 6:
            options["groups"] = 3
        yield Case(f"[{rows}, {width}]{'' if scalar is None else ' scaled'}", arrays, options)


@op(add_norm_cases)
def add_norm(x, weight, eps, residual=None, scalar=None, groups=1):
    """(residual + RMSNorm(x)) * scalar. Of the groups that x's rows belong to by turns, y has one after the other."""
    y = mx.fast.rms_norm(x, weight, eps)
    y = y if residual is None else residual + y
    y = y if scalar is None else y * scalar
    return y if groups == 1 else y.reshape(-1, groups, y.shape[-1]).swapaxes(0, 1).reshape(y.shape)


def is_faster(x, **rest) -> bool:
    return x.shape[0] <= 64 or x.size <= MAX_NUMBERS


@add_norm.kernel(ADD_NORM, is_faster=is_faster)
def launch(gpu, x, weight, eps, residual=None, scalar=None, groups=1):
    held = scalar if isinstance(scalar, mx.array) else None
    inputs = [x, weight, residual, held]
    constants = {"T": x.dtype, "K": x.shape[1], "EPS": bits_of(eps), "SCALED": held is not None}
    constants |= {"RES": residual is not None, "GROUPS": groups}
    constants["TIMES"] = bits_of(1.0 if scalar is None or held is not None else scalar)
    alike = {a.dtype for a in (weight, residual) if a is not None} == {x.dtype}
    constants["EACH"] = 8 if x.shape[1] % 8 == 0 and alike else 1
    constants["SIZE"] = min(MAX_THREADS, 32 * math.ceil(x.shape[1] / 256))
    return gpu(ADD_NORM, inputs, x.shape[0], constants["SIZE"], [(x.shape, x.dtype)], **constants)[0]


def cpu_unsupported(x, weight, residual=None, scalar=None, **rest) -> str | None:
    given = [a for a in (x, weight, residual, scalar) if isinstance(a, mx.array)]
    if other := {a.dtype for a in given} - {mx.float32}:
        return f"arrays of {other.pop()}"
    return f"{x.ndim} dimensions, rows of {x.shape[-1]} numbers" if x.ndim != 2 or x.shape[-1] % 16 else None


def cpu_cases() -> Iterator[Case]:
    for rows, width in ((1, 16), (3, 48), (2, 576), (17, 64), (40, 256), (1, 2048)):
        mx.random.seed(width)
        arrays = {name: mx.random.normal((rows, width)) for name in (("x", "residual") if rows % 2 else ("x",))}
        arrays["weight"] = mx.random.normal((width,))
        yield Case(f"[{rows}, {width}]", arrays, {"eps": 1e-5, "scalar": 0.3 if rows > 2 else None})
    arrays = {name: mx.random.normal((35, 48)) for name in ("x", "residual")} | {"weight": mx.random.normal((48,))}
    yield Case("[35, 48] of 7 groups", arrays, {"eps": 1e-5, "groups": 7})


@add_norm.cpu_kernel(unsupported=cpu_unsupported, cases=cpu_cases)
def launch_cpu(cpu, **arguments):
    return cpu.add_norm(**arguments)
