"""GPTQ, AWQ and compressed-tensors checkpoints: every weight is exactly what the format's definition says it is."""

import json
import struct

import mlx.core as mx
import numpy as np
import pytest

from mlxrt.errors import BadCheckpoint, MlxrtError, UnsupportedModel
from mlxrt.kernels.ops.bitpack import pack_bits, unpack_bits
from mlxrt.weights import FolderCheckpoint, build

from ..support import other_packers as packers
from ..support.log_lines import capture_log
from ..support.tiny_files import CONFIG, MATRICES, float_weights, write_folder

PACKED = [f"model.layers.{i}.{name}" for i in range(2) for name in MATRICES]


def folder(tmp_path, given: dict, draw, parts_of):
    """A llama whose matrices are packed; also path -> values."""
    arrays, truth = {}, {}
    for name, array in float_weights().items():
        path = name.removesuffix(".weight")
        if path not in PACKED:
            arrays[name] = mx.array(array.astype(np.float16))
            continue
        drawn = draw(*array.shape, seed=len(truth))
        truth[path] = drawn.values
        arrays |= {f"{path}.{part}": mx.array(value) for part, value in parts_of(drawn).items()}
    return write_folder(tmp_path, arrays, CONFIG | {"quantization_config": given}), truth


def loaded(path, dequantise=False):
    return build(FolderCheckpoint(path), dtype=mx.float32, dequantise=dequantise)


def matrix(module) -> np.ndarray:
    if "scales" not in module:
        return np.array(module.weight)
    assert module.weight.dtype == mx.uint32
    parts = module.weight, module.scales, module.biases
    return np.array(mx.dequantize(*parts, module.group_size, module.bits, module.mode))


def check(path, truth, packed: bool):
    for dequantise in (False, True):
        model = loaded(path, dequantise)
        modules = dict(model.named_modules())
        for name, values in truth.items():
            assert ("scales" in modules[name]) is (packed and not dequantise)
            assert np.array_equal(matrix(modules[name]).astype(np.float64), values), name
            x = np.random.default_rng(1).standard_normal((3, values.shape[1])).astype(np.float32)
            y = np.array(modules[name](mx.array(x)))
            assert np.abs(y - x.astype(np.float64) @ values.T).max() < 1e-4


def drawing(bits, size, **options):
    return lambda out, columns, seed: packers.draw(out, columns, bits, size, seed=seed, **options)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("index", [True, False])
def test_gptq(tmp_path, bits, form, symmetric, index):
    given = {"quant_method": "gptq", "bits": bits, "group_size": 64, "sym": symmetric, "checkpoint_format": form}
    parts = lambda d: packers.gptq(d, less=int(form == "gptq"), index=index)  # noqa: E731
    check(*folder(tmp_path, given, drawing(bits, 64, symmetric=symmetric), parts), packed=True)


@pytest.mark.parametrize("size", [32, 128, -1, 16])
def test_gptq_groups(tmp_path, size):
    given = {"quant_method": "gptq", "bits": 4, "group_size": size}
    parts = lambda d: packers.gptq(d, less=1, index=False)  # noqa: E731
    check(*folder(tmp_path, given, drawing(4, size), parts), packed=size != 16)


def test_gptq_act_order_is_dequantized_and_logged(tmp_path):
    given = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}
    path, truth = folder(tmp_path, given, drawing(4, 32, shuffled=True), lambda d: packers.gptq(d, less=1, index=True))
    check(path, truth, packed=False)
    lines = capture_log()
    loaded(path)
    assert any("14 matrices" in line and "act-order" in line for line in lines)


def test_gptq_zero_beyond_its_bits(tmp_path):
    """The first format stores zeros less one, so the largest stored number means one more than its bits hold."""

    def draw(out, columns, seed):
        drawn = packers.draw(out, columns, 4, 64, seed=seed)
        drawn.zero[:] = 16
        return drawn

    given = {"quant_method": "gptq", "bits": 4, "group_size": 64}
    check(*folder(tmp_path, given, draw, lambda d: packers.gptq(d, less=1, index=False)), packed=True)


def test_gptq_symmetric_without_zeros(tmp_path):
    parts = lambda d: packers.gptq(d, less=0, index=True, zeros=False)  # noqa: E731
    given = {"quant_method": "gptq", "bits": 8, "group_size": 128, "sym": True, "checkpoint_format": "gptq_v2"}
    path, truth = folder(tmp_path, given, drawing(8, 128, symmetric=True), parts)
    check(path, truth, packed=True)
    (path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": given | {"sym": False}}))
    with pytest.raises(BadCheckpoint, match="qzeros"):
        loaded(path)


@pytest.mark.parametrize("size", [32, 64, 128])
def test_awq(tmp_path, size):
    given = {"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm", "zero_point": True}
    check(*folder(tmp_path, given, drawing(4, size), packers.awq), packed=True)


def scheme(bits: int, form: str = "pack-quantized", **weights) -> dict:
    group = {"targets": ["Linear"], "weights": {"num_bits": bits, "type": "int", **weights}, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("size", [32, 128, -1])
@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_integers(tmp_path, bits, size, symmetric):
    parts = lambda d: packers.compressed(d, zeros=not symmetric, index=False)  # noqa: E731
    check(*folder(tmp_path, scheme(bits), drawing(bits, size, symmetric=symmetric), parts), packed=True)


def test_compressed_act_order(tmp_path):
    parts = lambda d: packers.compressed(d, zeros=False, index=True)  # noqa: E731
    drawn = drawing(4, 32, symmetric=True, shuffled=True)
    check(*folder(tmp_path, scheme(4, actorder="group"), drawn, parts), packed=False)


def as_float8(path, names) -> None:
    """Say in the header that these bytes are float8: MLX cannot write them."""
    blob = (path / "model.safetensors").read_bytes()
    [n] = struct.unpack("<Q", blob[:8])
    header = json.loads(blob[8 : 8 + n])
    for name in names:
        assert header[name]["dtype"] == "U8"
        header[name]["dtype"] = "F8_E4M3"
    text = json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + blob[8 + n :])


@pytest.mark.parametrize("scales", ["tensor", "channel"])
@pytest.mark.parametrize("form", ["float-quantized", "int-quantized"])
def test_compressed_bytes(tmp_path, form, scales):
    luck, arrays, truth = np.random.default_rng(3), {}, {}
    for name, array in float_weights().items():
        path = name.removesuffix(".weight")
        if path not in PACKED:
            arrays[name] = mx.array(array.astype(np.float16))
            continue
        stored = luck.integers(0, 256, array.shape).astype(np.uint8)
        stored[stored & 127 == 127] = 0  # not a number
        values = np.vectorize(packers.e4m3)(stored) if form == "float-quantized" else stored.view(np.int8).astype(float)
        scale = luck.uniform(0.001, 0.01, (array.shape[0], 1) if scales == "channel" else (1,)).astype(np.float16)
        arrays[name] = mx.array(stored if form == "float-quantized" else stored.view(np.int8))
        arrays[f"{path}.weight_scale"] = mx.array(scale)
        truth[path] = values * scale.astype(np.float64)
    path = write_folder(tmp_path, arrays, CONFIG | {"quantization_config": scheme(8, form)})
    if form == "float-quantized":
        as_float8(path, [f"{p}.weight" for p in PACKED])
    check(path, truth, packed=False)
    lines = capture_log()
    loaded(path)
    assert any("14 int8 or float8 matrices" in line for line in lines)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_streams_of_bits(bits):
    numbers = np.random.default_rng(bits).integers(0, 1 << bits, (3, 64))
    words = np.array([packers.stream(row, bits) for row in numbers], np.uint32)
    assert np.array_equal(np.array(pack_bits(mx.array(numbers.astype(np.uint32)), bits)), words)
    assert np.array_equal(np.array(unpack_bits(mx.array(words), bits)), numbers)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64}


@pytest.mark.parametrize(
    "given",
    [
        {**GPTQ, "bits": 5}, {**GPTQ, "bits": None}, {**GPTQ, "bits": True}, {**GPTQ, "group_size": 0},
        {**GPTQ, "group_size": "64"}, {**GPTQ, "group_size": 32}, {**GPTQ, "checkpoint_format": "marlin"},
        {**GPTQ, "dynamic": {"+:.*": {"bits": 8}}}, {**GPTQ, "dynamic": 3}, {**GPTQ, "bits": 8},
        {"quant_method": "awq", "version": "gemv"}, {"quant_method": "awq", "bits": 3}, {"quant_method": "awq"},
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
        {"quant_method": "compressed-tensors"},
        {"quant_method": "compressed-tensors", "format": ["pack-quantized"]},
    ],
)  # fmt: skip
def test_a_config_that_does_not_fit_is_typed(tmp_path, given):
    parts = lambda d: packers.gptq(d, less=1, index=False)  # noqa: E731
    path, _ = folder(tmp_path, given, drawing(4, 64), parts)
    with pytest.raises((BadCheckpoint, UnsupportedModel)):
        loaded(path)


@pytest.mark.parametrize(
    "part, value",
    [
        ("qweight", np.zeros((7, 9), np.int32)), ("qweight", np.zeros((4, 4), np.float32)),
        ("qweight", np.zeros(8, np.int32)),
        ("qzeros", np.zeros((1, 1), np.int32)), ("scales", np.zeros((2, 3), np.float16)), ("scales", None),
        ("scales", np.zeros((0, 128), np.float16)), ("g_idx", np.full(128, 99, np.int32)),
        ("g_idx", np.full(128, -1, np.int32)),
        ("g_idx", np.zeros(3, np.int32)), ("g_idx", np.zeros(128, np.float32)),
        ("weight", np.zeros((128, 128), np.float16)),
    ],
)  # fmt: skip
def test_a_damaged_part_is_typed_and_named(tmp_path, part, value):
    parts = lambda d: packers.gptq(d, less=1, index=True)  # noqa: E731
    path, _ = folder(tmp_path, GPTQ, drawing(4, 64), parts)
    arrays = dict(mx.load(str(path / "model.safetensors")))
    name = f"{PACKED[0]}.{part}"
    arrays.pop(name, None)
    if value is not None:
        arrays[name] = mx.array(value)
    write_folder(tmp_path, arrays, CONFIG | {"quantization_config": GPTQ})
    with pytest.raises(MlxrtError, match=PACKED[0]):
        loaded(path)
