"""A product of a sum: residual + RMSNorm(x) is what the matrix reads, and is handed out beside the product.

Where a branch is normed on its way out, add_norm would be a launch of its own before every product. Here each
threadgroup makes the whole sum for itself while its first weights are on their way, and the first one writes it. The
rest of the source is qmv's: the sum is rounded as if it had been in memory, so the product is the same.
"""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from ..registry import Case, KernelSource, op
from .add_norm import add_norm
from .linear import linear
from .qmv import QMV, bits_of, launch_qmv, qmv, qmv_case

ADD_NORM_QMV = KernelSource(
    "qmv.metal", (*QMV.inputs, "residual", "post", "scalar"), (*QMV.outputs, "h"), {"ADD_NORM": 1}, "add_norm"
)


def sum_cases(dtype: mx.Dtype) -> Iterator[Case]:
    shapes: list[tuple[Any, ...]] = [
        ("affine", 4, 64, 24, 1088, 1, {"norm": True, "eps": 1e-5, "activation": "gelu", "pair": True}),
        ("affine", 4, 32, 9, 96, 1, {"activation": "gelu", "times": True}),
        ("dense", 16, 32, 13, 2208, 2, {"norm": True, "eps": 1e-6, "scaled": True}),  # two tiles
        ("affine", 8, 64, 11, 1152, 3, {"norm": True, "eps": 1e-6}),  # two tiles
        ("affine", 4, 32, 5, 1024, 4, {"bias": True, "scaled": True}),  # a whole tile
        ("dense", 16, 32, 7, 2112, 1, {"bias": True}),  # a thread takes two pieces of x
        ("mxfp4", 4, 32, 9, 4128, 1, {"norm": True, "eps": 1e-6}),  # two tiles
        ("q4_k_split", 4, 32, 11, 512, 1, {"norm": True, "eps": 1e-6}),
        ("q6_k_split", 6, 32, 6, 1280, 2, {"bias": True}),
    ]
    for shape in shapes:
        base = qmv_case(dtype, *shape)
        (m, width), arrays = base.arrays["x"].shape, dict(base.arrays)
        arrays["x"] *= mx.arange(1, m + 1).astype(dtype)[:, None]  # each row has another divisor
        arrays["residual"] = mx.random.normal((m, width)).astype(dtype)
        arrays["post"] = (1 + 0.3 * mx.random.normal((width,))).astype(dtype)
        if shape[-1].get("scaled"):
            arrays["scalar"] = mx.array([0.7]).astype(dtype)
        yield Case(base.name, arrays, base.options | {"post_eps": 0.1})


def unfused(kernels, x, matrix, residual, post, post_eps, scalar=None, **product):
    h = kernels.run(add_norm, x=x, weight=post, eps=post_eps, residual=residual, scalar=scalar)
    return linear(kernels, h, matrix, **product), h


@op(sum_cases, unfused=unfused)
def add_norm_qmv(x, matrix, residual, post, post_eps, scalar=None, **product):
    """h = (residual + RMSNorm(x)) * scalar, and qmv of it: (the product [N, O], h [N, K])."""
    h = add_norm.reference(x, post, post_eps, residual, scalar)
    return qmv.reference(h, matrix, **product), h


def unsupported(x, matrix, residual, post, norm=None, **rest) -> str | None:
    if residual.dtype != x.dtype or post.dtype != x.dtype:  # they are read eight at a time, as words
        return f"a branch in {x.dtype}, the residual in {residual.dtype}, the norm in {post.dtype}"
    return matrix.unsupported(x, norm)


@add_norm_qmv.kernel(ADD_NORM_QMV, unsupported=unsupported, is_faster=qmv.is_faster)
def launch(gpu, x, matrix, residual, post, post_eps, scalar=None, **product):
    given = {"POST_EPS": bits_of(post_eps), "SCALED": scalar is not None}
    more, outputs = [residual, post, scalar], [(x.shape, x.dtype)]
    return tuple(launch_qmv(gpu, ADD_NORM_QMV, x, matrix, **product, more=more, outputs=outputs, **given))
