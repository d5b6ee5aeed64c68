"""A token's router and the gates and ups of the experts it chooses, in one launch.

The choice needs every logit, and threadgroups cannot wait for each other: so each makes all logits for itself, of which
the router's matrix is small enough, and then its share of one expert. That takes the device no longer than two launches
and the host one launch less. For one token; several would have the router's matrix read for each of them.
"""

import math
from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from ..device import DeviceProfile
from ..registry import Case, KernelSource, op
from ..testing import sample
from .activation import ACTIVATIONS
from .moe_qmv import moe_gate_up
from .moe_router import INPUTS, SIMDGROUPS, moe_router, router_constants
from .quantized import FORMS, SUM_WIDTHS, QuantizedMatrix

MAX_WIDTH = 4096  # elements of x: 16 KB of threadgroup memory

ROUTER_GATE_UP = KernelSource(
    "moe_router.metal",
    ("x", *INPUTS, "packed", "scales", "biases", "lut", "bias"),
    ("y", "experts", "weights"),
    {"FUSE_GATE_UP": 1},
    "gate_up",
)


def router_gate_up_cases(dtype: mx.Dtype) -> Iterator[Case]:
    shapes: list[tuple[Any, ...]] = [
        # tokens, k, experts, width, hidden, router's and experts' layout, what else
        (1, 4, 40, 64, 24, ("affine", 8), ("affine", 4), {"norm": True, "normalise": True}),
        (2, 2, 36, 1056, 9, ("dense", 16), ("affine", 4), {"norm": True}),
        (1, 4, 32, 96, 10, ("dense", 16), ("mxfp4", 4), {"rbias": True, "bias": True, "activation": "clamped"}),
        (1, 2, 33, 1024, 40, ("affine", 4), ("dense", 16), {"norm": True, "sigmoid": True, "correction": True}),
        (1, 3, 64, 2080, 290, ("affine", 8), ("affine", 3), {"normalise": True, "scales": True, "activation": "gelu"}),
        (1, 1, 1, 64, 24, ("affine", 8), ("affine", 4), {"norm": True, "sigmoid": True}),  # one expert for all
        (1, 8, 36, 64, 520, ("affine", 4), ("affine", 4), {"normalise": True}),  # several turns
        (1, 2, 40, 160, 12, ("lut", 2), ("lut", 3), {"normalise": True}),
        (1, 2, 36, 512, 12, ("dense", 16), ("q4_k_split", 4), {"norm": True, "normalise": True}),
        (1, 2, 33, 256, 9, ("q6_k_split", 6), ("q6_k_split", 6), {"normalise": True}),
        (1, 3, 32, 256, 10, ("q4_k_split", 4), ("iq4_xs_split", 4), {"normalise": True}),
    ]
    for rows, k, count, width, hidden, (mode, bits), (kind, each), extra in shapes:
        mx.random.seed(width + hidden)
        arrays = {"x": mx.random.normal((rows, width)).astype(dtype)}
        for name, size in (("norm", width), ("rbias", count), ("correction", count), ("scales", count)):
            if extra.get(name):
                arrays[name] = (1 + 0.3 * mx.random.normal((size,))).astype(dtype)
        if extra.get("bias"):
            arrays["bias"] = mx.random.normal((count, 2 * hidden)).astype(dtype)
        options = {
            "router": sample(mode, (count, width), dtype, bits),
            "matrix": sample(kind, (count, 2 * hidden, width), dtype, each),
            "k": k,
            "activation": extra.get("activation", "silu"),
            "eps": 1e-6,
            **{name: bool(extra.get(name)) for name in ("sigmoid", "normalise")},
        }
        yield Case(
            f"{k} of {count} by {mode}{bits}, {kind}{each} [{2 * hidden}, {width}], {rows} tokens", arrays, options
        )


def unfused(kernels, x, router, matrix, k, activation, norm=None, eps=0.0, rbias=None, bias=None, **rules):
    normed = {"norm": norm, "eps": eps}
    experts, weights = kernels.run(moe_router, x=x, matrix=router, k=k, bias=rbias, **normed, **rules)
    gated = {"matrix": matrix, "activation": activation, "bias": bias}
    return kernels.run(moe_gate_up, x=x, experts=experts, **gated, **normed), experts, weights


@op(router_gate_up_cases, unfused=unfused)
def moe_router_gate_up(
    x, router, matrix, k, activation, norm=None, eps=0.0, rbias=None, bias=None, correction=None, scales=None, **rules
):
    """moe_router, then moe_gate_up: (h [N, k, I], experts [N, k], weights [N, k])."""
    chosen = {"norm": norm, "eps": eps, "bias": rbias, "correction": correction, "scales": scales}
    experts, weights = moe_router.reference(x, router, k, **chosen, **rules)
    return moe_gate_up.reference(x, experts, matrix, activation, norm, eps, bias), experts, weights


def unsupported(x, router, matrix, k, norm=None, **rest) -> str | None:
    if matrix.width > MAX_WIDTH:
        return f"rows of {matrix.width} elements: {MAX_WIDTH} fit shared memory"
    return moe_router.unsupported(x, router, k, norm) or matrix.unsupported(x, norm)


def is_faster(x, router, matrix, **rest) -> bool:
    return x.shape[0] == 1 and matrix.width <= MAX_WIDTH and stage_mode(router, matrix) is not None


def stage_mode(router: QuantizedMatrix, matrix: QuantizedMatrix) -> str | None:
    """The layout whose sums of x are staged for both matrices; None where they need different ones."""
    widths = [SUM_WIDTHS.get(m.mode, 0) for m in (router, matrix)]
    return None if 0 < min(widths) < max(widths) else router.mode if widths[0] > widths[1] else matrix.mode


@moe_router_gate_up.kernel(ROUTER_GATE_UP, unsupported=unsupported, is_faster=is_faster)
def launch(
    gpu, x, router, matrix, k, activation, norm=None, eps=0.0, rbias=None, bias=None, correction=None, scales=None, **rules
):  # fmt: skip
    n, hidden, held = x.shape[0], matrix.rows // 2, matrix.constants()
    chosen = router_constants(x, router, k, norm, eps, rbias, correction, scales, **rules)
    each, loops = launch_config(gpu.profile, hidden * n * k, matrix)
    y, experts, weights = gpu(
        ROUTER_GATE_UP,
        [x, *router.inputs(), norm, rbias, correction, scales, *matrix.inputs(), bias],
        (math.ceil(hidden / (SIMDGROUPS * each * loops)), n * k, 1),
        32 * SIMDGROUPS,
        [((n, k, hidden), x.dtype), ((n, k), mx.uint32), ((n, k), mx.float32)],
        T=x.dtype,
        STAGE_FORM=FORMS[stage_mode(router, matrix) or matrix.mode],
        I=hidden,
        R=each,
        LOOPS=loops,
        **chosen,
        **held,
        BIAS=bias is not None,
        ACT=ACTIVATIONS[activation],
    )
    return y, experts, weights


def launch_config(profile: DeviceProfile, outputs: int, matrix: QuantizedMatrix) -> tuple[int, int]:
    """(gates of a simdgroup at once, how often): one wave of threadgroups, each of which computes all logits."""
    rows = math.ceil(outputs / (profile.scale(128) * SIMDGROUPS))
    each = min(rows, 3) if matrix.packed and matrix.bits <= 4 else 1
    return each, math.ceil(rows / each)
