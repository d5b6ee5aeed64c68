"""FP8 checkpoints against the format's definition in float64."""

import json
import struct

import mlx.core as mx
import numpy as np
import pytest

from mlxrt.errors import BadCheckpoint, UnsupportedModel
from mlxrt.weights import FolderCheckpoint
from mlxrt.weights.formats.fp8 import unpack_fp8
from tests.support.log_lines import capture_log


def e4m3(stored: np.ndarray) -> np.ndarray:
    """Sign, four bits of exponent with a bias of 7, three of fraction; exponent 0 has no leading one."""
    stored = stored.astype(np.int64)
    sign, exponent, fraction = np.where(stored >> 7, -1.0, 1.0), (stored >> 3) & 15, stored & 7
    normal = (1 + fraction / 8) * 2.0 ** (exponent - 7)
    return sign * np.where(exponent == 0, fraction / 8 * 2.0**-6, normal)


def drawn(shape, seed=0):
    stored = np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)
    return np.where((stored & 127) == 127, 0, stored).astype(np.uint8)  # 127 and 255 are NaN


def scaled(stored, scale, block):
    rows, columns = stored.shape[-2:]
    spread = np.repeat(np.repeat(scale, block[0], -2), block[1], -1)[..., :rows, :columns]
    return e4m3(stored) * spread


def config(**given):
    return {"quantization_config": {"quant_method": "fp8", "fmt": "float8_e4m3fn", **given}}


@pytest.mark.parametrize("shape, block", [((130, 300), (128, 128)), ((64, 96), (32, 48)), ((3, 70, 130), (64, 128))])
def test_values(shape, block):
    stored = drawn(shape)
    scales = (*shape[:-2], *(-(-n // b) for n, b in zip(shape[-2:], block)))
    scale = np.random.default_rng(1).random(scales).astype(np.float32) + 0.1
    logged = capture_log()
    arrays = {"a.weight": mx.array(stored), "a.weight_scale_inv": mx.array(scale), "b": mx.ones(3)}
    found = unpack_fp8(arrays, config(weight_block_size=list(block)), mx.float32)
    assert set(found) == {"a.weight", "b"} and found["a.weight"].dtype == mx.float32
    want = scaled(stored, scale.astype(np.float64), block)
    np.testing.assert_allclose(np.array(found["a.weight"]), want, rtol=1e-7)
    assert len(logged) == 1 and "1 FP8 matrices" in logged[0] and "float32" in logged[0]


def test_one_scale_for_all():
    stored = drawn((5, 7))
    arrays = {"a.weight": mx.array(stored), "a.weight_scale_inv": mx.array(0.3)}
    found = unpack_fp8(arrays, config(), mx.float32)
    np.testing.assert_allclose(np.array(found["a.weight"]), e4m3(stored) * np.float32(0.3), rtol=1e-7)


def test_powers_of_two_stay_packed():
    stored, scale = drawn((2, 140, 192)), 2.0 ** np.random.default_rng(1).integers(-9, 5, (2, 2, 2))
    arrays = {"a.weight": mx.array(stored), "a.weight_scale_inv": mx.array(scale.astype(np.float32))}
    found = unpack_fp8(arrays, config(), mx.bfloat16)
    assert found["a.weight"].dtype == mx.uint32 and found["a.scales"].dtype == mx.uint8
    plain = mx.dequantize(found["a.weight"], found["a.scales"], None, 32, 8, "mxfp8", dtype=mx.float32)
    assert np.array_equal(np.array(plain), scaled(stored, scale, (128, 128)))


def test_one_other_scale_unpacks_all():
    arrays = {"a.weight": mx.array(drawn((4, 64))), "a.weight_scale_inv": mx.array([[2.0]])}
    arrays |= {"b.weight": mx.array(drawn((4, 64))), "b.weight_scale_inv": mx.array([[3.0]])}
    found = unpack_fp8(arrays, config(), mx.bfloat16)
    assert {a.dtype for a in found.values()} == {mx.bfloat16}


@pytest.mark.parametrize(
    "change, given, error, words",
    [
        ({"a.weight": mx.ones((4, 64))}, {}, BadCheckpoint, "must be an FP8 matrix"),
        ({"a.weight": None}, {}, BadCheckpoint, "found nothing"),
        ({"a.weight_scale_inv": mx.ones((2, 1))}, {}, BadCheckpoint, r"expected \[1, 1\].*found \[2, 1\]"),
        ({"a.weight_scale_inv": mx.ones((1, 1), mx.uint8)}, {}, UnsupportedModel, "float scales"),
        ({}, {"weight_block_size": [128]}, BadCheckpoint, "weight_block_size"),
        ({}, {"weight_block_size": [0, 128]}, BadCheckpoint, "weight_block_size"),
        ({}, {"weight_block_size": "128"}, BadCheckpoint, "weight_block_size"),
        ({}, {"fmt": "e5m2"}, UnsupportedModel, "e5m2"),
    ],
)
def test_refused(change, given, error, words):
    arrays = {"a.weight": mx.array(drawn((4, 64))), "a.weight_scale_inv": mx.ones((1, 1))} | change
    with pytest.raises(error, match=words):
        unpack_fp8({n: a for n, a in arrays.items() if a is not None}, config(**given), mx.float32)


def test_fp8_without_scales_is_refused(tmp_path):
    header = json.dumps({"a.weight": {"dtype": "F8_E4M3", "shape": [2, 2], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match="F8_E4M3"):
        FolderCheckpoint(tmp_path).load()
