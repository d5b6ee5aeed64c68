"""Which experts a token goes to, and how much of each: norm, product, scores and the choice in one launch."""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from ..device import MIN_THREADGROUP_MEMORY
from ..registry import Case, KernelSource, op
from ..testing import sample
from .qmv import bits_of
from .quantized import QuantizedMatrix
from .staging import padded_width

MAX_EXPERTS = 512
SIMDGROUPS = 16

INPUTS = (
    *("router_packed", "router_scales", "router_biases", "router_lut"),
    *("norm_weight", "router_bias", "correction", "expert_scales"),
)
ROUTER = KernelSource("moe_router.metal", ("x", *INPUTS), ("experts", "weights"))


def router_cases(dtype: mx.Dtype) -> Iterator[Case]:
    shapes = [
        (1, 40, 64, 4, "dense", {"norm": True, "normalise": True}),
        (3, 128, 1056, 8, "affine", {"norm": True}),
        (2, 33, 96, 2, "dense", {"sigmoid": True, "correction": True, "normalise": True}),
        (2, 32, 64, 4, "dense", {"bias": True, "normalise": True, "scales": True}),
        (2, 35, 64, 3, "dense", {"correction": True}),
        (2, 1, 64, 1, "affine", {"norm": True, "sigmoid": True}),  # how much of an expert that every token uses
        (1, 36, 96, 3, "lut", {"normalise": True}),
        (2, 34, 512, 4, "q6_k_split", {"norm": True, "normalise": True}),
        (2, 37, 96, 4, "dense", {"wide": True, "norm": True, "sigmoid": True, "correction": True, "normalise": True}),
    ]
    for rows, count, width, k, mode, extra in shapes:
        mx.random.seed(count)
        matrix = sample(mode, (count, width), mx.float32 if extra.get("wide") else dtype, 8)
        arrays = {"x": mx.random.normal((rows, width)).astype(dtype)}
        for name, size in (("norm", width), ("bias", count), ("correction", count), ("scales", count)):
            if extra.get(name):
                arrays[name] = (1 + 0.3 * mx.random.normal((size,))).astype(dtype)
        rules = {name: bool(extra.get(name)) for name in ("sigmoid", "normalise")}
        options = {"matrix": matrix, "k": k, "eps": 1e-6, **rules}
        yield Case(f"{k} of {count}, {width} {mode}, {rows} tokens", arrays, options)


@op(router_cases)
def moe_router(
    x, matrix, k, norm=None, eps=0.0, bias=None, sigmoid=False, normalise=False, correction=None, scales=None
):
    """(experts [N, k], weights [N, k] float32), best first: softmax or sigmoid scores, `correction` on the choice."""
    h = x if norm is None else mx.fast.rms_norm(x, norm, eps)
    logits = matrix.multiply(h).astype(mx.float32)
    if bias is not None:
        logits = logits + bias
    shares = mx.sigmoid(logits) if sigmoid else mx.softmax(logits, axis=-1)
    experts = mx.argsort(-(shares if correction is None else shares + correction), axis=-1)[:, :k]
    weights = mx.take_along_axis(shares, experts, axis=-1)
    if normalise:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return experts, weights if scales is None else weights * scales[experts].astype(mx.float32)


def unsupported(x, matrix, k, norm=None, **rest) -> str | None:
    if matrix.rows > MAX_EXPERTS or k > 32:
        return f"{k} of {matrix.rows} experts"
    if (need := threadgroup_bytes(matrix)) > MIN_THREADGROUP_MEMORY:
        size = f"{matrix.rows} experts of {matrix.width} elements"
        return f"{size} need {need} bytes of shared memory, every GPU has {MIN_THREADGROUP_MEMORY}"
    return matrix.unsupported(x, norm, plain=mx.float32)


def threadgroup_bytes(matrix: QuantizedMatrix) -> int:
    """Bytes of threadgroup memory: a row of x with its sums, the logits, the lookup table, a float per simdgroup."""
    row, lut = padded_width(matrix.width), 1 if matrix.lut is None else 1 << matrix.bits
    return 4 * (row + row // 16 + matrix.rows + rows_at_once(matrix) - 1 + lut + SIMDGROUPS)


def rows_at_once(matrix: QuantizedMatrix) -> int:
    """Experts whose logits a simdgroup computes together."""
    return 4 if matrix.rows >= 64 else 2


def is_faster(x, **rest) -> bool:
    return x.shape[0] <= 64


@moe_router.kernel(ROUTER, unsupported=unsupported, is_faster=is_faster)
def launch(gpu, x, matrix, k, norm=None, eps=0.0, bias=None, correction=None, scales=None, **rules):
    n, constants = x.shape[0], router_constants(x, matrix, k, norm, eps, bias, correction, scales, **rules)
    experts, weights = gpu(
        ROUTER,
        [x, *matrix.inputs(), norm, bias, correction, scales],
        n,
        32 * SIMDGROUPS,
        [((n, k), mx.uint32), ((n, k), mx.float32)],
        T=x.dtype,
        STAGE_FORM=constants["RFORM"],
        **constants,
    )
    return experts, weights


def cpu_unsupported(x, matrix, k, norm=None, bias=None, correction=None, scales=None, **rest) -> str | None:
    given = [a for a in (x, norm, bias, correction, scales) if a is not None]
    if other := {a.dtype for a in given} - {mx.float32}:
        return f"arrays of {other.pop()}"
    return matrix.cpu_unsupported(x.dtype)


@moe_router.cpu_kernel(unsupported=cpu_unsupported, cases=lambda: iter(()))
def launch_cpu(cpu, x, matrix, k, **rules):
    return cpu.route(x, matrix, k, **rules)


def router_constants(
    x, matrix, k, norm, eps, bias, correction, scales, sigmoid=False, normalise=False
) -> dict[str, Any]:
    """The choice, as constants of a kernel."""
    held = matrix.constants()
    return {
        "RT": x.dtype if matrix.packed else matrix.weight.dtype,
        "RFORM": held["FORM"],
        "RBITS": held["BITS"],
        "RGROUP": held["GROUP"],
        "E": matrix.rows,
        "K": matrix.width,
        "C": k,
        "RR": rows_at_once(matrix),
        "SG": SIMDGROUPS,
        "TILE": padded_width(matrix.width),
        "NORM": norm is not None,
        "EPS": bits_of(eps) if norm is not None else 0,
        "RBIAS": bias is not None,
        "SIGMOID": sigmoid,
        "NORMALISE": normalise,
        "CORRECT": correction is not None,
        "SCALED": scales is not None,
    }
