"""Encoders of GGUF's K-quants and IQ4_NL in numpy: blocks of weights, each as the bytes of a file.

The scale of a group is searched: of a few steps around the plain one, which spans minimum and maximum, each gives
integers, and weighted least squares the best scale (and minimum) for these; the pair with the smallest error is taken.
Errors of large weights count more, as in llama.cpp. Decoders are PyPI's gguf and kernels/ops/k_quants.py.
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ...kernels.ops.k_quants import IQ4_VALUES

Blocks = np.ndarray  # float32 [n, 256]
STEP = 0.1  # of the searched scales, in units of an integer


def dot(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Of columns, which are groups: their products, added up."""
    return np.einsum("kg,kg->g", a, b)


def divide(a: Any, b: Any) -> np.ndarray:
    """a / b, 0 where b is 0."""
    return np.divide(a, b, out=np.zeros(np.broadcast_shapes(np.shape(a), np.shape(b)), np.float32), where=b != 0)


def fit_affine(x: np.ndarray, weights: np.ndarray, top: int, first: float, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """x [k, groups] as scale * q - minimum with q of 0 to `top`: scale >= 0 and minimum >= 0 of each group.

    `first` is where the search begins, in units of an integer beside `top`.
    """
    low = np.minimum(x.min(0), 0)
    span = x.max(0) - low
    total, sum_x, sum_xx = weights.sum(0), dot(weights, x), dot(weights * x, x)
    best_scale, best_low = span / top, low
    best_error = np.full(x.shape[1], np.inf, np.float32)
    above, q, weighted = x - low, np.empty_like(x), np.empty_like(x)
    for step in (None, *range(steps + 1)):
        wide = top if step is None else top + first + STEP * step
        np.multiply(above, divide(wide, span), out=q)
        np.clip(np.rint(q, out=q), 0, top, out=q)
        np.multiply(weights, q, out=weighted)
        sum_q, sum_qq, sum_qx = weighted.sum(0), dot(weighted, q), dot(weighted, x)
        if step is None:
            scale, minimum = best_scale, low
        else:
            known = total * sum_qq - sum_q * sum_q
            scale = divide(total * sum_qx - sum_x * sum_q, known)
            minimum = divide(sum_qq * sum_x - sum_q * sum_qx, known)
            positive = minimum > 0  # a minimum is subtracted: with none, the scale alone is fitted
            scale = np.where(positive, divide(sum_qx, sum_qq), scale)
            minimum = np.where(positive, 0, minimum)
        error = scale * scale * sum_qq + minimum * minimum * total + sum_xx
        error += 2 * (scale * minimum * sum_q - scale * sum_qx - minimum * sum_x)
        better = (error < best_error) & (scale > 0)
        best_scale, best_low = np.where(better, scale, best_scale), np.where(better, minimum, best_low)
        best_error = np.where(better, error, best_error)
    return best_scale, -best_low


def largest(x: np.ndarray) -> np.ndarray:
    """Of each column the number that is farthest from 0, with its sign."""
    return np.take_along_axis(x, np.abs(x).argmax(0)[None], 0)[0]


def fit_scale(
    x: np.ndarray, round_scaled: Callable[[np.ndarray], np.ndarray], end: float, offsets: Iterable[float]
) -> np.ndarray:
    """x [k, groups] as scale * q: the signed scale of each group, errors weighted by the square of a number.

    `round_scaled` makes q of scaled numbers; the one farthest from 0 is scaled to `end`, or to `offsets` beside it.
    """
    peak, weights = largest(x), x * x
    weighted_x = weights * x
    best_scale, best_score = np.zeros(x.shape[1], np.float32), np.zeros(x.shape[1], np.float32)
    for offset in offsets:
        q = round_scaled(x * divide(end + offset, peak))
        sum_qx, sum_qq = dot(weighted_x, q), dot(weights * q, q)
        score = divide(sum_qx * sum_qx, sum_qq)  # how much less the error is than without the group
        better = score > best_score
        best_scale = np.where(better, divide(sum_qx, sum_qq), best_scale)
        best_score = np.where(better, score, best_score)
    return best_scale


def columns(x: np.ndarray, size: int) -> np.ndarray:
    """Groups of neighbours as columns [size, groups], which numpy computes with faster than with short rows."""
    return np.ascontiguousarray(x.reshape(-1, size).T)


def to_half(x: np.ndarray) -> np.ndarray:
    """float32 as the float16 of a file, as float32 again."""
    return x.astype(np.float16).astype(np.float32)


def half_bytes(*values: np.ndarray) -> np.ndarray:
    return np.stack(values, axis=-1).astype("<f2").view(np.uint8)


def quantize_minima(
    x: Blocks, size: int, top: int, scale_top: int, weights: np.ndarray, first: float, steps: int
) -> tuple[np.ndarray, ...]:
    """Groups of `size` with a scale and a minimum, themselves integers up to `scale_top` times a float16 per block:
    both float16s [n], the integers [n, groups], and the values [n, 256]."""
    scale, minimum = (a.reshape(len(x), -1) for a in fit_affine(columns(x, size), weights, top, first, steps))
    integers, halves = [], []
    for each in (scale, minimum):
        half = each.max(1) / scale_top
        integers.append(np.clip(np.rint(divide(each, half[:, None])), 0, scale_top))
        halves.append(to_half(half))
    step, low = (i * half[:, None] for i, half in zip(integers, halves))
    q = divide(x.reshape(len(x), -1, size) + low[..., None], step[..., None])
    values = np.clip(np.rint(q), 0, top).astype(np.uint8).reshape(len(x), 256)
    return *halves, *(i.astype(np.uint8) for i in integers), values


def quantize_signed(x: Blocks, end: int, scale_end: int) -> tuple[np.ndarray, ...]:
    """Groups of 16 with a signed scale, itself an integer from -scale_end up times a float16 per block: the float16
    [n], the integers [n, 16] and the values, -end of which is 0, [n, 256]."""
    steps = [STEP * step for step in range(-9, 10)]
    scale = fit_scale(columns(x, 16), lambda q: np.clip(np.rint(q), -end, end - 1), -end, steps).reshape(len(x), 16)
    half = to_half(divide(largest(scale.T), -scale_end))
    integers = np.clip(np.rint(divide(scale, half[:, None])), -scale_end, scale_end - 1)
    q = divide(x.reshape(len(x), 16, 16), (integers * half[:, None])[..., None])
    values = np.clip(np.rint(q), -end, end - 1) + end
    return half, integers.astype(np.int8), values.astype(np.uint8).reshape(len(x), 256)


def pack_planes(values: np.ndarray, run: int, bits: int) -> np.ndarray:
    """Fields of `bits` bits as ggml has them: bytes of `run` values, then the next ones above them."""
    parts = values.reshape(len(values), -1, 8 // bits, run)
    return np.bitwise_or.reduce(
        parts << (bits * np.arange(8 // bits, dtype=np.uint8))[:, None], axis=2, dtype=np.uint8
    ).reshape(len(values), -1)


def pack_scales_and_minima(scales: np.ndarray, minima: np.ndarray) -> np.ndarray:
    """Eight of each, of six bits, in twelve bytes."""
    heads = [a[:, :4] | (a[:, 4:] >> 4 << 6) for a in (scales, minima)]
    return np.concatenate([*heads, (scales[:, 4:] & 15) | (minima[:, 4:] << 4)], axis=1)


def magnitudes(x: Blocks, size: int) -> np.ndarray:
    """Weights of errors [size, groups]: a number's own size, and that of its group."""
    groups = columns(x, size)
    return np.sqrt(dot(groups, groups) / size) + np.abs(groups)


def encode_q2_k(x: Blocks) -> np.ndarray:
    half, low, scales, minima, values = quantize_minima(x, 16, 3, 15, np.abs(columns(x, 16)), -0.5, 15)
    return np.concatenate([scales | (minima << 4), pack_planes(values, 32, 2), half_bytes(half, low)], axis=1)


def encode_q3_k(x: Blocks) -> np.ndarray:
    half, scales, values = quantize_signed(x, 4, 32)
    integers = (scales + 32).astype(np.uint8)
    packed = [pack_planes(values >> 2, 32, 1), pack_planes(values & 3, 32, 2)]
    packed += [pack_planes(integers & 15, 8, 4), pack_planes(integers >> 4, 4, 2)]
    return np.concatenate([*packed, half_bytes(half)], axis=1)


def encode_q4_k(x: Blocks) -> np.ndarray:
    half, low, scales, minima, values = quantize_minima(x, 32, 15, 63, magnitudes(x, 32), -1, 20)
    head = [half_bytes(half, low), pack_scales_and_minima(scales, minima)]
    return np.concatenate([*head, pack_planes(values, 32, 4)], axis=1)


def encode_q5_k(x: Blocks) -> np.ndarray:
    half, low, scales, minima, values = quantize_minima(x, 32, 31, 63, magnitudes(x, 32), -0.5, 15)
    head = [half_bytes(half, low), pack_scales_and_minima(scales, minima)]
    return np.concatenate([*head, pack_planes(values >> 4, 32, 1), pack_planes(values & 15, 32, 4)], axis=1)


def encode_q6_k(x: Blocks) -> np.ndarray:
    half, scales, values = quantize_signed(x, 32, 128)
    packed = [pack_planes(values & 15, 64, 4), pack_planes(values >> 4, 32, 2), scales.view(np.uint8)]
    return np.concatenate([*packed, half_bytes(half)], axis=1)


def encode_iq4_nl(x: np.ndarray) -> np.ndarray:
    """Blocks of 32 [n, 32]: indices of 16 fixed numbers, which lie closer together around 0."""
    numbers = np.array(IQ4_VALUES, np.float32)
    borders = (numbers[1:] + numbers[:-1]) / 2
    nearest = lambda q: numbers[np.searchsorted(borders, q)]  # noqa: E731
    half = to_half(fit_scale(columns(x, 32), nearest, numbers[0], range(-7, 8)))
    values = np.searchsorted(borders, divide(x, half[:, None])).astype(np.uint8)
    return np.concatenate([half_bytes(half), pack_planes(values, 16, 4)], axis=1)


ENCODERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Q2_K": encode_q2_k,
    "Q3_K": encode_q3_k,
    "Q4_K": encode_q4_k,
    "Q5_K": encode_q5_k,
    "Q6_K": encode_q6_k,
    "IQ4_NL": encode_iq4_nl,
}
