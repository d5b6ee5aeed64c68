"""The formats to the bit: tables, packings and matrices as the public package has them (make_vectors.py)."""

import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlxrt.kernels.ops.bitpack import pack_aligned, pack_bits, unpack_aligned, unpack_bits
from mlxrt.kernels.ops.codebook import codebook_rows, dequantize_codebook
from mlxrt.models.quantized.centroids import CUBIC, lloyd_max, odd_cubic
from mlxrt.models.quantized.codebook_linear import gather_codebook_matmul
from mlxrt.models.quantized.lut_linear import LUTEncoding, LUTExpertLinear, LUTLinear
from mlxrt.models.quantized.rotation import Rotation, binary_blocks, random_signs, rotate, unrotate
from mlxrt.weights.formats.folder import FolderCheckpoint
from mlxrt.weights.formats.jang.bitstreams import read_streams
from mlxrt.weights.formats.quantized import MLXFormat

HERE = Path(__file__).parent
STORED = dict(np.load(HERE / "vectors.npz"))


def under(prefix: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(f"{prefix}/"): array for name, array in STORED.items() if name.startswith(f"{prefix}/")}


def test_tables_are_the_packages_own():
    for name, true in under("tables").items():
        kind, width, last = name.split("_")
        made = random_signs(int(width), int(last)) if kind == "signs" else lloyd_max(int(width), int(last))
        assert made.dtype == np.float32 and np.array_equal(made, true.astype(np.float32)), name


def test_signs_are_numpys_choice():
    for seed in (0, 7, 42, 2**40):
        assert np.array_equal(random_signs(333, seed), np.random.default_rng(seed).choice([-1, 1], 333))


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_aligned_packing(bits):
    codes, packed = STORED[f"whole/codes_{bits}"], STORED[f"whole/packed_{bits}"]
    assert np.array_equal(np.array(unpack_aligned(mx.array(packed), bits, codes.shape[1])), codes)
    assert np.array_equal(np.array(pack_aligned(mx.array(codes), bits)), packed)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 8])
def test_streams_of_bits(bits):
    codes, words = STORED[f"stream/codes_{bits}"], STORED[f"stream/u32_{bits}"]
    assert np.array_equal(np.array(unpack_bits(mx.array(words), bits)), codes)
    assert np.array_equal(np.array(pack_bits(mx.array(codes.astype(np.uint32)), bits)), words)
    assert np.array_equal(words.view(np.uint8).reshape(-1), STORED[f"stream/bytes_{bits}"])


@pytest.mark.parametrize("width", [192, 3072])
def test_rotation(width):
    turn = Rotation(binary_blocks(width), 42)
    y = rotate(mx.array(STORED[f"turn/x{width}"]), turn.blocks, turn.signs())
    assert np.array_equal(np.array(y), STORED[f"turn/y{width}"])
    back = np.array(unrotate(y, turn.blocks, turn.signs()))
    assert np.abs(back - STORED[f"turn/x{width}"]).max() < 1e-6


MATRICES = [("20x320b3", 3, 320), ("32x192b4", 4, 192), ("16x192b8", 8, 192), ("pad3", 3, 96)]


@pytest.mark.parametrize(("name", "bits", "width"), MATRICES)
def test_jangtq_matrices(name, bits, width):
    stored = under("coded")
    words, norms = mx.array(stored[f"{name}_packed"]), mx.array(stored[f"{name}_norms"])
    coding = LUTEncoding.jangtq(bits, width, 42)
    assert np.array_equal(np.array(coding.unpack(words)), stored[f"{name}_codes"])
    assert np.abs(np.array(coding.matrix(words, norms)) - stored[f"{name}_deq"]).max() < 1e-6
    if f"{name}_y" in stored:
        layer = LUTLinear(coding, words.shape[0])
        layer.words, layer.norms = words, norms
        y = layer(mx.array(stored[f"{name}_x"]))
        assert y.dtype == mx.float32 and np.abs(np.array(y) - stored[f"{name}_y"]).max() < 1e-5


@pytest.mark.parametrize("bits", list(CUBIC))
def test_jangtq2_matrices(bits):
    stored = {k.removeprefix(f"b{bits}_"): v for k, v in under("second").items() if k.startswith(f"b{bits}_")}
    assert np.array_equal(odd_cubic(bits), stored["levels"])
    words, scales = mx.array(stored["tq2_packed"]), mx.array(stored["tq2_scales"])
    for rotated in (True, False):
        coding = LUTEncoding.jangtq2(bits, 128, rotated=rotated)
        if np.abs(np.array(coding.matrix(words, scales)) - stored["deq"]).max() < 1e-6:
            break
    else:
        pytest.fail("neither the rotated nor the plain matrix is the stored one")
    assert np.array_equal(np.array(coding.unpack(words)), stored["codes"])
    layer = LUTExpertLinear(coding, 1, words.shape[1])
    layer.words, layer.norms = words, scales
    x = mx.array(stored["x"])[:, None]  # [2, 1, in]
    y = np.array(layer(x, mx.array([0, 0])))[:, 0]
    assert np.abs(y - stored["x"] @ stored["deq"][0].T).max() < 1e-4


def test_one_bit():
    stored = {name: mx.array(array) for name, array in under("bit").items()}
    arrays = {"x.weight": stored["packed1"], "x.scales": stored["scales"], "x.biases": stored["biases"]}
    assert mx.array_equal(MLXFormat("affine", 1, 128).dequantize("x", arrays), stored["deq"])
    arrays["x.weight"] = stored["packed2"]
    assert mx.array_equal(MLXFormat("affine", 2, 128).dequantize("x", arrays), stored["deq"])


def test_vectors():
    stored = {name: mx.array(array) for name, array in under("vq").items()}
    assert mx.array_equal(dequantize_codebook(stored["indices"], stored["codebook"]), stored["deq"])
    one = codebook_rows.reference(stored["x"], stored["indices"][1], stored["codebook"], mx.float32)
    assert mx.allclose(one, stored["y_expert1"], atol=1e-5)
    for count in (1, 6):  # fewer pairs than experts, and more
        x, experts = mx.repeat(stored["x"][:1], count, axis=0)[:, None], mx.ones((count,), mx.uint32)
        y = gather_codebook_matmul(x, stored["indices"], stored["codebook"], experts)[:, 0]
        assert mx.allclose(y, mx.repeat(stored["y_expert1"][:1], count, axis=0), atol=1e-5)


def test_first_version(tmp_path):
    shutil.copytree(HERE / "first_version", tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text('{"model_type": "qwen3"}')
    arrays = read_streams(FolderCheckpoint(tmp_path / "m").load(), mx.float32)
    bits = set()
    for path, true in under("first").items():
        width = 32 * arrays[f"{path}.weight"].shape[-1] // true.shape[-1]
        assert np.array_equal(np.array(MLXFormat("affine", width, 64).dequantize(path, arrays)), true), path
        bits.add(width)
    assert len(bits) == 6 and "model.norm.weight" in arrays
