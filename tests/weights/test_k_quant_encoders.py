"""Encoders of K-quants: decoded by PyPI's gguf, their error is below that of plain minima and maxima."""

import gguf
import numpy as np
import pytest

from mlxrt.weights.convert.gguf_blocks import PART, encode
from mlxrt.weights.convert.k_quants import ENCODERS

BLOCKS = {kind: 32 if kind == "IQ4_NL" else 256 for kind in ENCODERS}
GROUPS = {"Q2_K": (16, 3), "Q4_K": (32, 15), "Q5_K": (32, 31)}  # with a minimum: numbers, largest integer
SIGNED = {"Q3_K": (16, 4), "Q6_K": (16, 32), "IQ4_NL": (32, 8)}  # without: numbers, half of the integers


def decode(blocks: np.ndarray, kind: str) -> np.ndarray:
    return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])


def plain(x: np.ndarray, kind: str) -> np.ndarray:
    """Every group between its minimum and maximum, with scales that are not rounded."""
    if kind in GROUPS:
        size, top = GROUPS[kind]
        groups = x.reshape(-1, size)
        low = np.minimum(groups.min(1, keepdims=True), 0)
        scale = (groups.max(1, keepdims=True) - low) / top
        return (np.rint((groups - low) / scale) * scale + low).reshape(x.shape)
    size, half = SIGNED[kind]
    groups = x.reshape(-1, size)
    scale = np.abs(groups).max(1, keepdims=True) / half
    return (np.clip(np.rint(groups / scale), -half, half - 1) * scale).reshape(x.shape)


@pytest.mark.parametrize("kind", ENCODERS)
@pytest.mark.parametrize("tail", [4, 100])
def test_errors_are_below_those_of_plain_scales(kind, tail):
    x = np.random.default_rng(0).standard_t(tail, (400, 256)).astype(np.float32) * 0.02
    found = decode(ENCODERS[kind](x.reshape(-1, BLOCKS[kind])), kind).reshape(x.shape)
    error, limit = (((y - x) ** 2).mean() / (x**2).mean() for y in (found, plain(x, kind)))
    assert error < limit


@pytest.mark.parametrize("kind", ENCODERS)
def test_blocks_that_are_all_alike(kind):
    """Zeros, one number, one number among zeros, the smallest and the largest that float16 scales allow."""
    x = np.zeros((8, 256), np.float32)
    x[1], x[2], x[3, 7], x[4, 7] = 1.5, -1.5, 2.0, -2.0
    x[5] = np.linspace(-6e4, 6e4, 256)
    x[6] = 1e-7 * np.arange(256)
    with np.errstate(divide="raise", invalid="raise", over="raise"):
        found = decode(ENCODERS[kind](x.reshape(-1, BLOCKS[kind])), kind).reshape(x.shape)
    assert not found[[0, 7]].any()
    np.testing.assert_allclose(found[1:3], x[1:3], rtol=2e-3)
    np.testing.assert_allclose(found[3:5], x[3:5], rtol=0, atol=0.02)  # IQ4_NL has no 0
    assert np.isfinite(found).all() and np.abs(found[5] - x[5]).max() < 25000 and np.abs(found[6]).max() < 1e-4


@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0", "F16"])
def test_parts_are_in_order(kind):
    x = np.random.default_rng(1).standard_normal((3 * PART // 256 + 5, 256)).astype(np.float32)
    parts = [np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in encode("x", x, kind)]
    assert len(parts) == 4
    found = decode(np.concatenate(parts).reshape(len(x), -1), kind)
    assert np.abs(found - x).max() < 0.3 and found.shape == x.shape
