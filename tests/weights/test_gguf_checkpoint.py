"""GGUF models: equal to `mx.load` and to the Hugging Face folder they came from, for every architecture and kind."""

import os
from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxrt.errors import BadCheckpoint, NoTokenizer, UnsupportedModel
from mlxrt.weights import FolderCheckpoint, GgufCheckpoint, build
from mlxrt.weights.formats.gguf.tensors import convert, stored_rows
from tests.support.tiny_files import CONFIG, add_tensor, float_weights, gguf_name, write_folder, write_gguf

from ..support.log_lines import capture_log

PACKED = ("Q4_0", "Q4_1", "Q8_0")


def parameters(model) -> dict:
    return dict(tree_flatten(model.parameters()))


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_same_model_as_the_folder(tmp_path, arch, tied):
    config = CONFIG | {"model_type": arch, "tie_word_embeddings": tied}
    weights = float_weights(config)
    logged = capture_log()
    ours = build(GgufCheckpoint(write_gguf(tmp_path / "x.gguf", weights, config)))
    theirs = build(FolderCheckpoint(write_folder(tmp_path, weights, config)))
    assert parameters(ours).keys() == parameters(theirs).keys() and logged == []
    for name, array in parameters(theirs).items():
        assert mx.array_equal(parameters(ours)[name], array), name
    left, right = vars(ours.config), vars(theirs.config)
    assert {k: left[k] for k in left if k != "rms_norm_eps"} == {k: right[k] for k in right if k != "rms_norm_eps"}
    assert left["rms_norm_eps"] == np.float32(right["rms_norm_eps"])  # GGUF stores it in 32 bits


@pytest.mark.parametrize("kind", ["F32", "F16", *PACKED])
def test_bit_exactly_what_mx_load_gives(tmp_path, kind):
    """BF16 is not here: `mx.load` rounds it to float16, we keep it (its values are checked below)."""
    path = write_gguf(tmp_path / "x.gguf", float_weights(), kind=kind)
    parsed, theirs = GgufCheckpoint(path).file, mx.load(str(path))
    ours = {}
    for record in parsed.tensors.values():
        ours |= convert(record, stored_rows(parsed, record))
    assert ours.keys() == theirs.keys() and all(ours[n].dtype == a.dtype for n, a in theirs.items())
    assert all(mx.array_equal(ours[n], a) for n, a in theirs.items())


@pytest.mark.parametrize("kind", ["F16", "BF16", *PACKED, "Q5_0", "Q5_1"])
def test_values_of_every_kind(tmp_path, kind):
    """Quantised rows, q and k permuted by the converter: equal to the gguf package's dequantiser on unpermuted rows."""
    weights = float_weights()
    logged = capture_log()
    checkpoint = GgufCheckpoint(write_gguf(tmp_path / "x.gguf", weights, kind=kind))
    model = build(checkpoint, dtype=mx.float32, dequantise=True)
    assert logged == []
    type_ = gguf.GGMLQuantizationType[kind]
    for name, value in weights.items():
        stored = gguf.quants.dequantize(gguf.quants.quantize(value, type_), type_) if value.ndim == 2 else value
        np.testing.assert_allclose(np.array(parameters(model)[name]), stored, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "IQ2_XXS"])
def test_kinds_that_only_the_gguf_package_reads(tmp_path, kind):
    type_ = gguf.GGMLQuantizationType[kind]
    config = CONFIG | {"hidden_size": 256}  # a K block is 256 wide
    block, width = gguf.GGML_QUANT_SIZES[type_]
    random = np.random.default_rng(0)
    raw = random.integers(0, 60, (48, 256 // block * width), np.uint8)  # small bytes: every float16 inside is finite
    weights = float_weights(config)
    del weights["lm_head.weight"]
    path = write_gguf(
        tmp_path / "x.gguf", weights, config, extra=lambda w: w.add_tensor("output.weight", raw, raw_dtype=type_)
    )
    logged = capture_log()
    loaded = GgufCheckpoint(path).load()["lm_head.weight"]
    assert loaded.dtype == mx.float16 and len(logged) == 1 and f"1 {kind}" in logged[0]
    np.testing.assert_array_equal(np.array(loaded), gguf.quants.dequantize(raw, type_).astype(np.float16))


def test_kind_that_nobody_reads(tmp_path):
    weights = float_weights()
    del weights["model.norm.weight"]
    path = write_gguf(
        tmp_path / "x.gguf", weights, extra=lambda w: w.add_tensor("output_norm.weight", np.zeros(128, np.int32))
    )
    with pytest.raises(UnsupportedModel, match=r"output_norm.weight has the GGUF type I32"):
        GgufCheckpoint(path).load()


def test_packed_scales_beyond_float16(tmp_path):
    weights = float_weights() | {"lm_head.weight": np.full((48, 128), 60000, np.float32)}
    weights["lm_head.weight"][:, 0] = -8e6
    with np.errstate(all="ignore"):
        path = write_gguf(tmp_path / "x.gguf", weights, kind="Q8_0")
    with pytest.raises(BadCheckpoint, match=r"output.weight \(Q8_0\) holds values beyond float16"):
        GgufCheckpoint(path).load()


def keys(tmp_path, extra, config=CONFIG) -> dict:
    return GgufCheckpoint(write_gguf(tmp_path / "x.gguf", float_weights(config), config, extra=extra)).config


def test_rope(tmp_path):
    assert keys(tmp_path, None)["rope_theta"] == 10000.0
    assert keys(tmp_path, lambda w: w.add_rope_freq_base(5e5))["rope_theta"] == 5e5

    def linear(w):
        w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        w.add_rope_scaling_factor(4.0)

    assert keys(tmp_path, linear)["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}

    def yarn(w):
        w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        w.add_rope_scaling_factor(4.0)
        w.add_rope_scaling_orig_ctx_len(16)

    expected = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    assert keys(tmp_path, yarn)["rope_scaling"] == expected
    with pytest.raises(BadCheckpoint, match=r"rope.scaling.factor must be a finite number > 0, found nothing"):
        keys(tmp_path, lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR))
    with pytest.raises(UnsupportedModel, match="longrope"):
        keys(tmp_path, lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE))


def test_rope_factors(tmp_path):
    factors = np.linspace(1, 8, 16, dtype=np.float32)
    path = write_gguf(
        tmp_path / "x.gguf", float_weights(), extra=lambda w: add_tensor(w, "rope_freqs.weight", factors, "F32")
    )
    checkpoint = GgufCheckpoint(path)
    assert checkpoint.config["rope_freq_factors"] == factors.tolist()
    assert "rope_freqs.weight" not in checkpoint.sizes() and "rope_freqs.weight" not in checkpoint.load()
    np.testing.assert_allclose(
        build(checkpoint).config.rope.periods, 10000.0 ** (np.arange(16) / 16) * factors, rtol=1e-6
    )
    bad = write_gguf(
        tmp_path / "y.gguf", float_weights(), extra=lambda w: add_tensor(w, "rope_freqs.weight", factors[:4], "F32")
    )
    with pytest.raises(BadCheckpoint, match=r"rope_freqs.weight must be F32 \[16\], found F32 \[4\]"):
        GgufCheckpoint(bad)


def test_ends_and_tokens(tmp_path):
    def tokens(w):
        w.add_token_list(["a"] * 40)
        w.add_bos_token_id(1)
        w.add_eos_token_id(2)
        w.add_eot_token_id(3)
        w.add_eom_token_id(2)

    config = keys(tmp_path, tokens)
    assert (config["bos_token_id"], config["eos_token_id"], config["vocab_size"]) == (1, [2, 3], 48)
    with pytest.raises(BadCheckpoint, match="eos_token_id must be an id below 48, found 48"):
        keys(tmp_path, lambda w: w.add_eos_token_id(48))
    with pytest.raises(BadCheckpoint, match="49 tokens, the embedding 48 rows"):
        keys(tmp_path, lambda w: w.add_token_list(["a"] * 49))


def test_what_changes_the_arithmetic_is_refused_or_logged(tmp_path):
    with pytest.raises(UnsupportedModel, match=r"qwen3\.expert_count = 8"):
        keys(tmp_path, lambda w: w.add_expert_count(8), CONFIG | {"model_type": "qwen3"})
    with pytest.raises(UnsupportedModel, match=r"llama.logit_scale = 2.0"):
        keys(tmp_path, lambda w: w.add_logit_scale(2.0))
    with pytest.raises(UnsupportedModel, match=r"rope.dimension_count is 16, the head size 32"):
        keys(tmp_path, lambda w: w.add_rope_dimension_count(16))
    with pytest.raises(BadCheckpoint, match=r"one of 3 splits, so its name must end in -00001-of-00003.gguf"):
        keys(tmp_path, lambda w: w.add_uint16("split.count", 3))
    window = keys(tmp_path, lambda w: w.add_sliding_window(32))
    assert window["model_type"] == "mistral" and window["sliding_window"] == 32
    with pytest.raises(UnsupportedModel, match="for which layers"):
        keys(tmp_path, lambda w: w.add_sliding_window(32), CONFIG | {"model_type": "qwen3"})
    logged = capture_log()
    path = write_gguf(tmp_path / "y.gguf", float_weights(), extra=lambda w: w.add_uint32("llama.new_thing", 1))
    build(GgufCheckpoint(path))
    assert len(logged) == 1 and "llama.new_thing" in logged[0]


def without(tmp_path, change: dict):
    """The metadata of a good file with some keys replaced; None deletes."""
    from mlxrt.weights.formats.gguf.config import build_config

    parsed = GgufCheckpoint(write_gguf(tmp_path / "x.gguf", float_weights())).file
    metadata = {k: v for k, v in (parsed.metadata | change).items() if v is not None}
    return build_config(metadata, parsed.tensors)


@pytest.mark.parametrize(
    "key, value, error",
    [
        ("general.architecture", None, BadCheckpoint),
        ("general.architecture", 5, BadCheckpoint),
        ("general.architecture", "mamba9", UnsupportedModel),
        ("llama.block_count", None, BadCheckpoint),
        ("llama.block_count", 0, BadCheckpoint),
        ("llama.block_count", True, BadCheckpoint),
        ("llama.embedding_length", 2**32, BadCheckpoint),
        ("llama.embedding_length", "128", BadCheckpoint),
        ("llama.attention.head_count", [], BadCheckpoint),
        ("llama.attention.head_count", [4, 2], UnsupportedModel),
        ("llama.attention.head_count_kv", [[2]], BadCheckpoint),
        ("llama.attention.layer_norm_rms_epsilon", None, BadCheckpoint),
        ("llama.attention.layer_norm_rms_epsilon", float("nan"), BadCheckpoint),
        ("llama.rope.freq_base", -1.0, BadCheckpoint),
        ("llama.rope.freq_base", float("inf"), BadCheckpoint),
        ("llama.rope.scaling.type", 7, UnsupportedModel),
        ("llama.rope.scaling.type", ["yarn"], UnsupportedModel),
        ("llama.expert_count", -1, BadCheckpoint),
        ("llama.attention.value_length", 16, UnsupportedModel),
        ("tokenizer.ggml.tokens", 5, BadCheckpoint),
        ("tokenizer.ggml.eos_token_id", -1, BadCheckpoint),
        ("tokenizer.ggml.bos_token_id", "1", BadCheckpoint),
    ],
)
def test_bad_metadata(tmp_path, key, value, error):
    with pytest.raises(error):
        without(tmp_path, {key: value})


def test_heads_given_per_layer(tmp_path):
    assert without(tmp_path, {"llama.attention.head_count": [4, 4]})["num_attention_heads"] == 4


def test_q_rows_that_fit_no_heads(tmp_path):
    weights = float_weights() | {"model.layers.0.self_attn.k_proj.weight": np.zeros((66, 128), np.float32)}
    with pytest.raises(BadCheckpoint, match=r"blk.0.attn_k.weight has 66 rows, expected 2 heads x 32"):
        GgufCheckpoint(write_gguf(tmp_path / "x.gguf", weights)).load()


@pytest.mark.parametrize(
    "name, shape, kind",
    [("weight", (128,), "Q4_0"), ("weight", (2, 64, 128), "F32"), ("bias", (128,), "Q8_0"), ("bias", (1, 128), "F32")],
)
def test_q_that_cannot_be_unpermuted(tmp_path, name, shape, kind):
    weights = float_weights()
    del weights["model.layers.0.self_attn.q_proj.weight"]
    value = np.ones(shape, np.float32)
    path = write_gguf(tmp_path / "x.gguf", weights, extra=lambda w: add_tensor(w, f"blk.0.attn_q.{name}", value, kind))
    with pytest.raises(BadCheckpoint, match=f"blk.0.attn_q.{name} is {kind} .*, not a matrix or plain bias"):
        GgufCheckpoint(path).load()


def test_unknown_tensor_is_a_leftover(tmp_path):
    path = write_gguf(
        tmp_path / "x.gguf",
        float_weights(),
        extra=lambda w: add_tensor(w, "blk.0.attn_sinks.weight", np.zeros(4, np.float32), "F32"),
    )
    with pytest.raises(BadCheckpoint, match=r"no parameter for 1 tensors \(blk.0.attn_sinks.weight\)"):
        build(GgufCheckpoint(path))


def test_no_tokenizer(tmp_path):
    checkpoint = GgufCheckpoint(write_gguf(tmp_path / "x.gguf", float_weights()))
    with pytest.raises(NoTokenizer, match=r"x.gguf holds no tokenizer"):
        checkpoint.tokenizer()
    assert checkpoint.files() == [tmp_path / "x.gguf"]


def test_names_go_there_and_back():
    from mlxrt.weights.formats.gguf.architectures import ARCHITECTURES

    for arch in ("llama", "qwen2", "qwen3"):
        for name in float_weights(CONFIG | {"model_type": arch}):
            assert ARCHITECTURES[arch].rename(gguf_name(name)) == name


@pytest.mark.skipif("MLXRT_SMOLLM2_GGUF" not in os.environ, reason="needs the real file: MLXRT_SMOLLM2_GGUF=path")
def test_real_smollm2_equals_mx_load():
    path = Path(os.environ["MLXRT_SMOLLM2_GGUF"])
    parsed, theirs = GgufCheckpoint(path).file, mx.load(str(path))
    for record in parsed.tensors.values():
        for name, array in convert(record, stored_rows(parsed, record)).items():
            other = theirs.pop(name)
            assert array.dtype == other.dtype and mx.array_equal(array, other), name
    assert not theirs


def test_kinds_that_are_unpacked_are_logged_with_their_bytes(tmp_path):
    config = CONFIG | {"hidden_size": 256, "intermediate_size": 256}
    weights, name = float_weights(config), "model.layers.0.mlp.gate_proj.weight"
    logged = capture_log()
    path = write_gguf(tmp_path / "x.gguf", weights, config, kinds={name: "TQ2_0"})
    assert GgufCheckpoint(path).load()[name].dtype == mx.float16
    [line] = logged  # 66 bytes of the file for 256 weights
    assert line.endswith("unpacking 1 TQ2_0 to float16: 0.0 MB of the file become 0.1 MB"), line
