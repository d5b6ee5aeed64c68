"""Every packed layout MLX has: what the filled modules compute against float64 from the formats' definitions."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlxrt.errors import BadCheckpoint, UnsupportedModel
from mlxrt.weights import FolderCheckpoint, build
from mlxrt.weights.formats.quantized import MLXFormat, QuantizedEmbedding
from tests.support import mlx_format_truth
from tests.support.tiny_files import CONFIG, float_weights, write_folder

from ..support.log_lines import capture_log

AFFINE = [("affine", bits, group) for bits in (1, 2, 3, 4, 5, 6, 8) for group in (32, 64, 128)]
BLOCKS = [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)]


def pack(weights: dict, choose) -> tuple[dict, dict]:
    """Packed arrays and the matrices they stand for; `choose(path)` gives (mode, bits, group)."""
    arrays, truth = {}, {}
    for name, value in weights.items():
        path = name.removesuffix(".weight")
        if value.ndim != 2:
            arrays[name] = mx.array(value)
            continue
        mode, bits, group = choose(path)
        parts = mx.quantize(mx.array(value), group, bits, mode)
        arrays |= {f"{path}.{part}": array for part, array in zip(("weight", "scales", "biases"), parts)}
        truth[path] = mlx_format_truth.matrix(mode, bits, group, *(np.array(p) for p in parts))
    return arrays, truth


def check(model, truth: dict, vocab: int) -> None:
    random = np.random.default_rng(1)
    modules = dict(model.named_modules())
    for path, matrix in truth.items():
        module = modules[path]
        if path.endswith("embed_tokens"):
            rows = module(mx.arange(vocab))
            assert rows.dtype == mx.float32
            np.testing.assert_allclose(np.array(rows), matrix, atol=1e-4)
            continue
        x = random.standard_normal((3, matrix.shape[1]), np.float32)
        y = module(mx.array(x))
        assert y.dtype == mx.float32
        np.testing.assert_allclose(np.array(y), x.astype(np.float64) @ matrix.T, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("layout", AFFINE + BLOCKS, ids=str)
def test_layout(tmp_path, layout):
    arrays, truth = pack(float_weights(), lambda path: layout)
    checkpoint = FolderCheckpoint(write_folder(tmp_path, arrays))
    logged = capture_log()
    model = build(checkpoint)
    assert logged == []
    module = model.model.layers[1].mlp.down_proj
    assert isinstance(module, nn.QuantizedLinear) and (module.mode, module.bits, module.group_size) == layout
    check(model, truth, CONFIG["vocab_size"])
    check(build(checkpoint, dequantise=True), truth, CONFIG["vocab_size"])


@pytest.mark.parametrize("dequantise", [False, True])
def test_mixed_bits(tmp_path, dequantise):
    kinds = [*BLOCKS, ("affine", 3, 32), ("affine", 8, 64), ("affine", 6, 128)]
    weights = float_weights()
    where = {name.removesuffix(".weight"): kinds[i % len(kinds)] for i, name in enumerate(weights)}
    arrays, truth = pack(weights, where.get)
    model = build(FolderCheckpoint(write_folder(tmp_path, arrays)), dequantise=dequantise)
    assert dequantise != any(isinstance(m, nn.QuantizedLinear) for _, m in model.named_modules())
    check(model, truth, CONFIG["vocab_size"])


@pytest.mark.parametrize("layout", [("affine", 4, 32), *BLOCKS], ids=str)
def test_tied_head_reuses_the_packed_embedding(tmp_path, layout):
    config = CONFIG | {"tie_word_embeddings": True}
    arrays, truth = pack(float_weights(config), lambda path: layout)
    model = build(FolderCheckpoint(write_folder(tmp_path, arrays, config)))
    x = np.random.default_rng(2).standard_normal((2, 128), np.float32)
    size = np.sqrt(np.mean(x.astype(np.float64) ** 2, axis=-1, keepdims=True) + config["rms_norm_eps"])
    expected = x / size * np.array(model.model.norm.weight) @ truth["model.embed_tokens"].T
    np.testing.assert_allclose(np.array(model.logits(mx.array(x))), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("layout", [("affine", 4, 32), *BLOCKS], ids=str)
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=str)
def test_activations_keep_the_dtype(tmp_path, layout, dtype):
    arrays, _ = pack(float_weights(), lambda path: layout)
    model = build(FolderCheckpoint(write_folder(tmp_path, arrays)), dtype=dtype)
    h = model.model.embed_tokens(mx.array([1, 2]))
    assert h.dtype == dtype and model.model.layers[0].mlp(h).dtype == dtype and model.logits(h).dtype == dtype


def test_embedding_gathers_rows_before_dequantising():
    fmt, rows, width = MLXFormat("affine", 4, 64), 4096, 1024
    table = QuantizedEmbedding(rows, width, fmt, mx.float32)
    mx.eval(table.parameters())
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(table(mx.array([7, 4000])))
    assert mx.get_peak_memory() - before < rows * width * 4 / 8


def test_config_is_only_a_hint_and_a_contradiction_is_said_once(tmp_path):
    arrays, truth = pack(float_weights(), lambda path: ("affine", 4, 32))
    config = CONFIG | {"quantization": {"bits": 8, "group_size": 64, "lm_head": {"bits": 4, "group_size": 32}}}
    logged = capture_log()
    model = build(FolderCheckpoint(write_folder(tmp_path, arrays, config)))
    check(model, truth, CONFIG["vocab_size"])
    [line] = logged
    assert "15 modules" in line and "affine 4 bit group 32" in line and "8 bit" in line


def layers(path: str, weight, scales, biases=None) -> dict:
    arrays = float_weights()
    arrays |= {f"{path}.weight": weight, f"{path}.scales": scales}
    return arrays if biases is None else arrays | {f"{path}.biases": biases}


def words(cols: int) -> mx.array:
    return mx.zeros((48, cols), mx.uint32)


@pytest.mark.parametrize(
    "parts, error, named",
    [
        ((words(16), mx.zeros((48, 8)), mx.zeros((48, 8))), UnsupportedModel, "4 bit, group 16"),
        ((words(28), mx.zeros((48, 4)), mx.zeros((48, 4))), UnsupportedModel, "7 bit, group 32"),
        ((words(32), mx.zeros((48, 8), mx.uint8)), UnsupportedModel, "8 bit, group 16"),
        ((words(17), mx.zeros((48, 4)), mx.zeros((48, 4))), BadCheckpoint, "17 uint32"),
        ((words(16), mx.zeros((48, 3)), mx.zeros((48, 3))), BadCheckpoint, "3 scales"),
        ((words(0), mx.zeros((48, 4)), mx.zeros((48, 4))), BadCheckpoint, "0 uint32"),
        ((words(16), mx.zeros((48, 4))), BadCheckpoint, "float32 scales without biases"),
        ((words(16), mx.zeros((48, 4), mx.uint8), mx.zeros((48, 4))), BadCheckpoint, "uint8 scales with biases"),
        ((mx.zeros((48, 16)), mx.zeros((48, 4)), mx.zeros((48, 4))), BadCheckpoint, "uint32 matrix; found float32"),
        ((words(16), mx.zeros((47, 4)), mx.zeros((48, 4))), BadCheckpoint, r"lm_head.scales: expected shape \[48, 4\]"),
        ((words(16), mx.zeros((48, 4)), mx.zeros((48, 2))), BadCheckpoint, r"lm_head.biases: expected shape \[48, 4\]"),
        ((words(16)[:9], mx.zeros((48, 4)), mx.zeros((48, 4))), BadCheckpoint, r"lm_head.weight: expected .*\[9, 16\]"),
    ],
)
def test_layouts_without_a_kernel(tmp_path, parts, error, named):
    with pytest.raises(error, match=named):
        build(FolderCheckpoint(write_folder(tmp_path, layers("lm_head", *parts))))


def test_only_matrices_can_be_packed(tmp_path):
    arrays = layers("model.norm", words(16), mx.zeros((48, 4)), mx.zeros((48, 4)))
    with pytest.raises(UnsupportedModel, match=r"model\.norm is packed, but it is a RMSNorm"):
        build(FolderCheckpoint(write_folder(tmp_path, arrays)))


@pytest.mark.parametrize("method", ["bitsandbytes", "bitnet", "hqq"])
def test_other_methods_are_named(tmp_path, method):
    config = CONFIG | {"quantization_config": {"quant_method": method, "bits": 4, "group_size": 128}}
    with pytest.raises(UnsupportedModel, match=f"= {method} is"):
        build(FolderCheckpoint(write_folder(tmp_path, float_weights(), config)))


@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
def test_quantisation_that_is_no_object(tmp_path, key):
    with pytest.raises(BadCheckpoint, match=f"{key} must be an object, found 4bit"):
        build(FolderCheckpoint(write_folder(tmp_path, float_weights(), CONFIG | {key: "4bit"})))
