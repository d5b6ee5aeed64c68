"""A token's experts: gates and ups of each, then the weighted sum of their downs. Two launches for all of them."""

import math
from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from ..device import DeviceProfile
from ..mlx_defects import gather_mm
from ..registry import Case, KernelSource, op
from ..testing import sample
from .activation import ACTIVATIONS, activate
from .qmv import bits_of, unsupported
from .quantized import QuantizedMatrix
from .staging import tile_width

MAX_QMV_TOKENS = 64  # up to which a qmv for each of their experts is the faster way
# Threadgroups of downs to a multiprocessor, by their registers: 7.0 us against 8.7 with as many as each likes.
RESIDENT = 4
TOGETHER = 4  # experts whose downs are computed together: 1024 elements of x each are 16 KB

GATE_UP = KernelSource(
    "moe_gate_up.metal", ("x", "experts", "packed", "scales", "biases", "lut", "norm_weight", "bias"), ("y",)
)
DOWN = KernelSource(
    "moe_down.metal", ("x", "experts", "weights", "packed", "scales", "biases", "lut", "bias", "residual"), ("y",)
)


def gate_up_cases(dtype: mx.Dtype) -> Iterator[Case]:
    shapes: list[tuple[Any, ...]] = [
        (1, 4, 8, 64, 24, "affine", {"norm": True}),
        (3, 2, 5, 1056, 9, "affine", {}),
        (2, 2, 4, 96, 10, "mxfp4", {"bias": True, "activation": "clamped"}),
        (1, 2, 3, 64, 7, "dense", {"activation": "gelu"}),
        (1, 2, 3, 1024, 5, "affine", {"norm": True}),
        (2, 1, 1, 64, 9, "affine", {"norm": True}),  # one expert for all
        (2, 2, 4, 96, 10, "lut", {"bits": 2}),
        (1, 3, 4, 1120, 9, "lut", {"bits": 3, "activation": "gelu"}),
        (3, 2, 3, 64, 7, "lut", {"bits": 4, "norm": True}),
        (1, 2, 3, 160, 8, "lut", {"bits": 8}),
        (1, 2, 3, 1056, 5, "lut", {"bits": 1, "bias": True}),
        (2, 2, 4, 512, 10, "q4_k_split", {"norm": True}),
        (1, 3, 3, 1280, 7, "q6_k_split", {"bias": True, "activation": "clamped"}),
        (1, 2, 3, 256, 5, "q2_k_split", {}),
        (1, 2, 3, 256, 6, "iq4_xs_split", {}),
    ]
    for rows, k, count, width, hidden, mode, extra in shapes:
        mx.random.seed(width + hidden)
        matrix = sample(mode, (count, 2 * hidden, width), dtype, extra.get("bits", 4))
        experts = mx.random.randint(0, count, (rows, k)).astype(mx.uint32)
        arrays = {"x": mx.random.normal((rows, width)).astype(dtype), "experts": experts}
        if extra.get("norm"):
            arrays["norm"] = (1 + 0.1 * mx.random.normal((width,))).astype(dtype)
        if extra.get("bias"):
            arrays["bias"] = mx.random.normal((count, 2 * hidden)).astype(dtype)
        options = {"matrix": matrix, "eps": 1e-6, "activation": extra.get("activation", "silu")}
        yield Case(f"{mode}{matrix.bits} {k} of {count} [{2 * hidden}, {width}], {rows} tokens", arrays, options)


def down_cases(dtype: mx.Dtype) -> Iterator[Case]:
    for rows, k, count, width, outs, mode, bits, extra in [
        (1, 4, 8, 96, 40, "affine", 4, ("residual",)),
        (3, 2, 5, 1056, 9, "affine", 4, ()),
        (2, 3, 4, 64, 33, "mxfp4", 4, ("bias", "residual")),
        (1, 2, 3, 64, 8, "dense", 16, ()),
        (2, 1, 1, 96, 40, "affine", 4, ("residual",)),  # one expert for all
        (1, 6, 8, 1024, 9, "affine", 4, ()),  # whole tiles, and more experts than simdgroups
        (1, 8, 9, 1120, 7, "lut", 2, ("residual",)),
        (2, 5, 4, 96, 12, "lut", 3, ("bias",)),
        (1, 1, 3, 2080, 9, "lut", 4, ()),
        (3, 2, 3, 64, 10, "lut", 8, ("residual",)),
        (1, 3, 3, 160, 8, "lut", 1, ()),
        (1, 2, 4, 512, 12, "q4_k_split", 4, ("residual",)),
        (2, 6, 5, 1280, 9, "q6_k_split", 6, ("bias",)),
        (1, 2, 3, 256, 5, "q3_k_split", 3, ()),
        (1, 2, 3, 256, 6, "iq4_nl_split", 4, ()),
        (2, 6, 5, 1056, 514, "lut", 2, ()),  # so many rows that a simdgroup takes several, of which some are none
    ]:
        mx.random.seed(width + outs)
        arrays = {
            "x": mx.random.normal((rows, k, width)).astype(dtype),
            "experts": mx.random.randint(0, count, (rows, k)).astype(mx.uint32),
            "weights": mx.random.uniform(0, 1, (rows, k)),
        }
        if "residual" in extra:
            arrays["residual"] = mx.random.normal((rows, outs)).astype(dtype)
        if "bias" in extra:
            arrays["bias"] = mx.random.normal((count, outs)).astype(dtype)
        name = f"{mode}{bits} {k} of {count} [{outs}, {width}], {rows} tokens"
        yield Case(name, arrays, {"matrix": sample(mode, (count, outs, width), dtype, bits)})


def gather_qmm(matrix: QuantizedMatrix, x: mx.array, experts: mx.array) -> mx.array:
    """x [N, k or 1, K] through the matrices of `experts` [N, k] -> [N, k, O]; a matrix alone is a stack of one."""
    matrix = matrix.as_stack()
    if matrix.lut_matrix is not None:
        return matrix.lut_matrix.gather_multiply(x[:, :, None], experts)[:, :, 0].astype(x.dtype)
    if matrix.is_k_quant:
        y = gather_mm(x[:, :, None], matrix.plain().astype(x.dtype).swapaxes(-1, -2), experts)
    elif matrix.scales is not None:
        w, s, b = matrix.weight, matrix.scales, matrix.biases
        y = mx.gather_qmm(
            x[:, :, None], w, s, b, rhs_indices=experts, transpose=True,
            group_size=matrix.group, bits=matrix.bits, mode=matrix.mode,
        )  # fmt: skip
    else:
        y = gather_mm(x[:, :, None], matrix.weight.swapaxes(-1, -2), experts)
    return y[:, :, 0]


@op(gate_up_cases)
def moe_gate_up(x, experts, matrix, activation, norm=None, eps=0.0, bias=None):
    """x [N, K] -> [N, k, I]: the activated gates times ups of each token's experts."""
    h = x if norm is None else mx.fast.rms_norm(x, norm, eps)
    y = gather_qmm(matrix, h[:, None], experts)
    if bias is not None:
        y = y + bias[experts]
    return activate(activation, *mx.split(y, 2, axis=-1))


@op(down_cases)
def moe_down(x, experts, weights, matrix, bias=None, residual=None):
    """x [N, k, I] -> [N, O]: the sum of what each token's experts make of it, by weight; + residual."""
    y = gather_qmm(matrix, x, experts)
    if bias is not None:
        y = y + bias[experts]
    y = (y * weights.astype(y.dtype)[..., None]).sum(axis=1)
    return y if residual is None else residual + y


@moe_gate_up.kernel(GATE_UP, unsupported=unsupported, is_faster=lambda x, **rest: x.shape[0] <= MAX_QMV_TOKENS)
def launch_gate_up(gpu, x, experts, matrix, activation, norm=None, eps=0.0, bias=None):
    (n, k), hidden = experts.shape, matrix.rows // 2
    each = 2 if hidden * n * k >= gpu.profile.scale(4096) else 1
    [y] = gpu(
        GATE_UP,
        [x, experts, *matrix.inputs(), norm, bias],
        (math.ceil(hidden / (8 * each)), n * k, 1),
        256,
        [((n, k, hidden), x.dtype)],
        T=x.dtype,
        C=k,
        K=matrix.width,
        I=hidden,
        R=each,
        SG=8,
        RESIDENT=2,  # not timed apart: downs and products gained by it
        TILE=tile_width(matrix.width, 1),
        **matrix.constants(),
        NORM=norm is not None,
        EPS=bits_of(eps) if norm is not None else 0,
        BIAS=bias is not None,
        ACT=ACTIVATIONS[activation],
    )
    return y


@moe_down.kernel(DOWN, unsupported=unsupported, is_faster=lambda x, **rest: x.shape[0] <= MAX_QMV_TOKENS)
def launch_down(gpu, x, experts, weights, matrix, bias=None, residual=None):
    (n, k), outs = experts.shape, matrix.rows
    each, size = rows_per_simdgroup(gpu.profile, outs * n, matrix), min(k, TOGETHER)
    [y] = gpu(
        DOWN,
        [x, experts, weights, *matrix.inputs(), bias, residual],
        (math.ceil(outs / each), n, 1),
        32 * size,
        [((n, outs), x.dtype)],
        T=x.dtype,
        C=k,
        K=matrix.width,
        O=outs,
        R=each,
        SG=size,
        RESIDENT=RESIDENT,
        **matrix.constants(),
        BIAS=bias is not None,
        RES=residual is not None,
    )
    return y


def rows_per_simdgroup(profile: DeviceProfile, rows: int, matrix: QuantizedMatrix) -> int:
    """As many as a lane has registers for, but not so many that cores stay idle."""
    return max(1, min(4, rows // profile.scale(256), 16 // matrix.bits)) if matrix.packed else 1
