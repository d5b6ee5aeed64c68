"""A few rows of x times a matrix, packed or plain, in one launch: norm before; bias, activation, residual, cap after.

A qmv lives on bytes in flight and on few instructions a weight. x lies unpacked in threadgroup memory; a simdgroup
goes over many rows of the matrix, several at once, 16 bytes a lane, and the words of the next ones are on their way
while it multiplies those it has. RMSNorm costs no pass of its own, because its divisor is a factor of the result.
"""

import math
import struct
from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from ..device import DeviceProfile
from ..registry import Case, KernelSource, op
from ..testing import sample
from .activation import ACTIVATIONS, activate
from .quantized import QuantizedMatrix
from .staging import tile_width

MAX_QMV_ROWS = 4  # rows of x up to which this is the faster way

QMV = KernelSource("qmv.metal", ("x", "packed", "scales", "biases", "lut", "norm_weight", "bias", "other"), ("y",))


def bits_of(value: float) -> int:
    """A float as the integer with its bits: kernel constants are integers."""
    return int.from_bytes(struct.pack("<f", value), "little", signed=True)


def qmv_cases(dtype: mx.Dtype) -> Iterator[Case]:
    shapes: list[tuple[Any, ...]] = [
        ("affine", 4, 64, 40, 128, 1, {"norm": True, "eps": 1e-6}),
        ("affine", 4, 32, 37, 1056, 3, {"residual": True}),
        ("affine", 8, 64, 24, 1088, 2, {"norm": True, "eps": 1e-5, "activation": "silu", "pair": True}),
        ("affine", 3, 32, 9, 96, 4, {"bias": True}),
        ("affine", 5, 64, 7, 192, 1, {"activation": "gelu", "times": True}),
        ("affine", 4, 64, 9, 1024, 1, {"norm": True, "eps": 1e-6}),  # a whole tile
        ("affine", 4, 64, 12, 128, 2, {"norm": True, "eps": 1e-6, "activation": "sigmoid", "times": True}),
        ("affine", 6, 128, 5, 256, 1, {"bias": True, "activation": "clamped", "pair": True}),
        ("affine", 2, 32, 16, 64, 2, {"residual": True, "bias": True}),
        ("mxfp4", 4, 32, 11, 160, 1, {"norm": True, "eps": 1e-6}),
        ("affine", 4, 64, 21, 192, 2, {"norm": True, "eps": 1e-6, "softcap": 3.0}),
        ("dense", 16, 32, 13, 1184, 2, {"norm": True, "eps": 1e-6, "residual": True}),
        ("lut", 2, 0, 37, 1120, 3, {"residual": True}),
        ("lut", 3, 0, 9, 96, 1, {"activation": "silu", "pair": True}),
        ("lut", 4, 0, 16, 1056, 2, {"bias": True}),
        ("lut", 8, 0, 11, 64, 4, {}),
        ("lut", 1, 0, 20, 1024, 1, {}),
        ("q4_k_split", 4, 32, 21, 1280, 1, {"norm": True, "eps": 1e-6}),
        ("q6_k_split", 6, 32, 13, 1280, 3, {"residual": True}),
        ("q5_k_split", 5, 32, 9, 512, 2, {"activation": "silu", "pair": True}),
        ("q3_k_split", 3, 32, 11, 1024, 1, {"bias": True}),
        ("q2_k_split", 2, 32, 7, 768, 2, {"norm": True, "eps": 1e-6}),
        ("iq4_xs_split", 4, 32, 12, 512, 1, {"activation": "gelu", "times": True}),
        ("iq4_nl_split", 4, 32, 10, 1120, 2, {"residual": True}),
    ]
    for shape in shapes:
        yield qmv_case(dtype, *shape)


def qmv_case(dtype: mx.Dtype, mode, bits, group, rows, width, m, extra: dict[str, Any]) -> Case:
    """m rows of `width` elements times a matrix; `extra` names what stands before and after."""
    mx.random.seed(rows)
    pair = bool(extra.get("pair"))
    total = rows * 2 if pair else rows
    matrix = sample(mode, (total, width), dtype, bits, group)
    arrays = {"x": mx.random.normal((m, width)).astype(dtype)}
    options = {"matrix": matrix, "activation": extra.get("activation"), "pair": pair, "eps": extra.get("eps", 0.0)}
    options["softcap"] = extra.get("softcap")
    if extra.get("norm"):
        arrays["norm"] = (1 + 0.1 * mx.random.normal((width,))).astype(dtype)
    if extra.get("bias"):
        arrays["bias"] = mx.random.normal((total,)).astype(dtype)
    for name in ("residual", "times"):
        if extra.get(name):
            arrays[name] = mx.random.normal((m, rows)).astype(dtype)
    return Case(f"{mode}{bits} group {group} [{rows}, {width}] x{m}", arrays, options)


@op(qmv_cases)
def qmv(
    x, matrix, norm=None, eps=0.0, bias=None, activation=None, pair=False, times=None, residual=None, softcap=None
):  # fmt: skip
    """x [N, K] -> [N, O]: normed first, then the matrix, bias, activation (of gate times up with `pair`), residual, cap."""
    h = x if norm is None else mx.fast.rms_norm(x, norm, eps)
    y = matrix.multiply(h)
    return apply_epilogue(y if bias is None else y + bias, activation, pair, times, residual, softcap)


def apply_epilogue(y, activation=None, pair=False, times=None, residual=None, softcap=None) -> mx.array:
    """What follows a product and its bias."""
    if activation is not None:
        gate, up = mx.split(y, 2, axis=-1) if pair else (y, times)
        y = activate(activation, gate, up)
    if residual is not None:
        y = residual + y
    return y if softcap is None else mx.tanh(y / softcap) * softcap


def unsupported(x, matrix, norm=None, **rest) -> str | None:
    return matrix.unsupported(x, norm)


def is_faster(x, **rest) -> bool:
    return x.shape[0] <= MAX_QMV_ROWS


@qmv.kernel(QMV, unsupported=unsupported, is_faster=is_faster)
def launch(gpu, **arguments):
    return launch_qmv(gpu, QMV, **arguments)[0]


def launch_qmv(
    gpu, source, x, matrix, norm=None, eps=0.0, bias=None, activation=None, pair=False, times=None, residual=None,
    softcap=None, dtype=None, more=(), outputs=(), **constants,
):  # fmt: skip
    """`source` is QMV, or a variant of it that has `more` inputs, `outputs` and constants; `dtype`: of y, if not x's."""
    rows, m = matrix.rows // 2 if pair else matrix.rows, x.shape[0]
    config = tile_config(gpu.profile, rows, matrix, m, pair)
    other = times if times is not None else residual
    return gpu(
        source,
        [x, *matrix.inputs(), norm, bias, other, *more],
        math.ceil(rows / (config["SG"] * config["LOOPS"] * config["R"])),
        32 * config["SG"],
        [((m, rows), dtype or x.dtype), *outputs],
        T=dtype or x.dtype,
        M=m,
        K=matrix.width,
        O=rows,
        **config,
        **matrix.constants(),
        NORM=norm is not None,
        EPS=bits_of(eps) if norm is not None else 0,
        **epilogue_constants(bias, activation, pair, times, residual, softcap),
        **constants,
    )


def tile_config(profile: DeviceProfile, rows: int, matrix: QuantizedMatrix, m: int, pair: bool) -> dict[str, int]:
    """How simdgroups share the rows: several at once where there are enough, in as many threadgroups as run together.

    Four rows at once need half of a core's registers for a threadgroup. Left to itself the compiler takes all of them: on
    an H200 25.9 us instead of 18.8 for 24576 x 4096, 136 instead of 97 for 151936 x 4096. Of K-quants in groups of 16 it
    takes so many that two of three threadgroups fit; none spills with three.
    """
    simdgroups, tile = 8, tile_width(matrix.width, m)
    most = 1
    if matrix.packed:
        most = 4 if matrix.rows >= profile.scale(16384) else 2 if matrix.rows >= profile.scale(2048) else 1
    each = max(1, most // m // (2 if pair else 1))
    threadgroups, resident = (264, 2) if most == 4 else (512, 3 if matrix.is_k_quant else 1)
    loops = max(1, math.ceil(rows / (simdgroups * each * profile.scale(threadgroups)))) if matrix.width <= tile else 1
    loops = min(loops, 2048 // (m * simdgroups * each * (2 if pair else 1)))  # 8 KB of partial sums
    return {"SG": simdgroups, "R": each, "LOOPS": loops, "TILE": tile, "RESIDENT": resident}


def epilogue_constants(bias, activation, pair, times, residual, softcap=None) -> dict[str, int]:
    """What follows a product, as template constants."""
    given = {"BIAS": bias is not None, "TIMES": times is not None, "RES": residual is not None, "PAIR": pair}
    return {**given, "ACT": ACTIVATIONS[activation], "CAP": 0 if softcap is None else bits_of(softcap)}


def cpu_unsupported(x, matrix, **rest) -> str | None:
    return matrix.cpu_unsupported(x.dtype)


def cpu_cases() -> Iterator[Case]:
    shapes: list[tuple[Any, ...]] = [
        ("q2_k", 0, 32, 13, 512, 1, {"norm": True, "eps": 1e-5}),
        ("q3_k", 0, 32, 9, 256, 2, {"residual": True}),
        ("q4_k", 0, 32, 37, 768, 3, {"bias": True}),
        ("q4_k", 0, 32, 33, 256, 21, {"norm": True, "eps": 1e-6, "activation": "silu", "pair": True}),
        ("q5_k", 0, 32, 7, 512, 4, {"activation": "gelu", "times": True}),
        ("affine", 8, 32, 10, 96, 2, {"activation": "sigmoid", "times": True}),
        ("affine", 4, 32, 66, 96, 3, {"bias": True, "activation": "clamped", "pair": True}),
        ("q6_k", 0, 32, 41, 1024, 5, {"softcap": 300.0}),
        ("iq2_xxs", 0, 32, 39, 768, 1, {"residual": True}),
        ("affine", 4, 32, 70, 608, 40, {"bias": True, "activation": "silu", "pair": True, "residual": True}),
        ("affine", 8, 64, 67, 1088, 17, {"residual": True}),
        ("affine", 6, 128, 5, 384, 16, {}),
        ("mxfp4", 4, 32, 37, 352, 1, {"norm": True, "eps": 1e-5, "residual": True}),
        ("mxfp4", 4, 32, 66, 1120, 21, {"bias": True, "activation": "clamped", "pair": True}),
    ]
    for shape in shapes:
        yield qmv_case(mx.float32, *shape)


@qmv.cpu_kernel(unsupported=cpu_unsupported, cases=cpu_cases)
def launch_cpu(cpu, x, matrix, **arguments):
    """Any number of rows."""
    return cpu.matmul(x, matrix, **arguments)
