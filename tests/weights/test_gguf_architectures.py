"""GGUF files of the families llama.cpp's converter changes most, against the folder they came from and Hugging Face."""

import json
import re
import shutil
from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxrt.errors import BadCheckpoint, UnsupportedModel
from mlxrt.models.moe import QuantizedExpertLinear
from mlxrt.weights import FolderCheckpoint, GgufCheckpoint, build
from mlxrt.weights.formats.gguf.architectures import ARCHITECTURES
from mlxrt.weights.formats.gguf.config import build_config
from mlxrt.weights.formats.gguf.reader import GGUFTensor
from mlxrt.weights.formats.gguf.reorder import take_columns
from tests.parity_adapter import batch, logits
from tests.support.llama_cpp_files import convert, tensors
from tests.support.llama_cpp_files import read as spelled
from tests.support.phi3_folder import long_rope, write_phi3
from tests.support.qwen2_moe_folder import write_qwen2_moe

from ..support.log_lines import capture_log

FIXTURES = Path(__file__).parents[1] / "parity"
ROWS = [
    ("gemma2", "base"), ("gemma2", "v5"), ("gemma3_text", "base"), ("gemma3_text", "v5"), ("gemma3_mm", "base"),
    ("gemma3_mm", "v5"), ("qwen3_moe", "base"), ("qwen3_moe", "v5"), ("qwen3_moe", "yarn"), ("mixtral", "base"),
    ("mixtral", "v5"), ("mixtral", "yarn"), ("gpt_oss", "base"), ("gpt_oss", "dense"), ("gpt_oss", "v5"),
    ("qwen3_next", "base"), ("qwen3_next", "yarn"), ("qwen3_5", "base"), ("qwen3_5", "v5"), ("qwen3_5_moe", "base"),
    ("gemma4_e2b", "base"), ("gemma4_e2b", "v5"), ("gemma4_mm", "base"), ("gemma4_moe", "base"), ("gemma4_moe", "v5"),
    ("minimax_m2", "base"), ("minimax_m2", "yarn"),
]  # fmt: skip
NO_KEY = {"swiglu_alpha": 1.702}  # the one number of the fixtures that GGUF cannot hold


@pytest.fixture
def made(tmp_path):
    """A fixture as a folder, with changes to its config."""

    def make(arch, variant="base", **changes):
        source, folder = FIXTURES / arch, tmp_path / f"{arch}-{variant}"
        known = json.loads((source / "meta.json").read_text())["variants"].get(variant, {})
        config = json.loads((source / known.get("config", "config.json")).read_text())
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config | (NO_KEY if arch == "gpt_oss" else {}) | changes))
        shutil.copy(source / known.get("weights", "model.safetensors"), folder / "model.safetensors")
        return folder

    return make


def reference(arch, variant):
    known = json.loads((FIXTURES / arch / "meta.json").read_text())["variants"].get(variant, {})
    return dict(np.load(FIXTURES / arch / known.get("ref", "ref.npz")))


@pytest.mark.parametrize("arch, variant", [row for row in ROWS if row[0] != "gpt_oss"])
def test_hugging_faces_logits(made, tmp_path, arch, variant):
    """gpt-oss is not here for want of that key; check_parity.py runs it (tests/gguf_parity_adapter.py)."""
    path, ref = convert(made(arch, variant), tmp_path / "x.gguf"), reference(arch, variant)
    for key in [k.removesuffix(".logits") for k in ref if re.fullmatch(r"len\d+\.logits", k)]:
        found = logits(path, ref[f"{key}.tokens"].tolist())
        assert found.shape == ref[f"{key}.logits"].shape
        assert np.abs(found - ref[f"{key}.logits"]).max() < 1e-3
    if variant == "base":
        prompts = [ref[f"len{n}.tokens"].tolist() for n in (7, 64, 1, 33)]
        assert batch(path, prompts, 24) == [ref[f"greedy{n}.tokens"].tolist() for n in (7, 64, 1, 33)]


@pytest.mark.parametrize("arch, variant", ROWS)
def test_same_model_as_the_folder(made, tmp_path, arch, variant):
    folder, logged = made(arch, variant), capture_log()
    theirs = build(FolderCheckpoint(folder), dtype=mx.float32)
    ours = build(GgufCheckpoint(convert(folder, tmp_path / "x.gguf")), dtype=mx.float32)
    assert logged == []
    left, right = (dict(tree_flatten(m.parameters())) for m in (ours, theirs))
    assert left.keys() == right.keys()
    for name, array in right.items():
        assert left[name].dtype == array.dtype
        assert mx.allclose(left[name], array, rtol=0, atol=2e-7), name  # a norm less one and one again
    for layer, other in zip(ours.config.windows, theirs.config.windows, strict=True):
        assert layer == other
    a, b = ours.config.rope, theirs.config.rope
    assert (a.kind, a.dim, a.scale) == (b.kind, b.dim, b.scale)
    np.testing.assert_allclose(a.periods or a.theta, b.periods or b.theta, rtol=1e-6)
    assert a.magnitude == pytest.approx(b.magnitude)


def test_qwen2_moe(tmp_path):
    """Against mlx-lm, which has a Qwen2-MoE of its own, from the folder and from GGUF."""
    from mlx_lm.utils import load_model

    folder = write_qwen2_moe(tmp_path / "folder", mlp_only_layers=[])  # mlx-lm has experts in every layer
    tokens = np.random.default_rng(2).integers(0, 64, 40).tolist()
    theirs, _ = load_model(folder)
    expected = np.array(theirs(mx.array([tokens]))[0])
    assert expected.std() > 1
    for path in (folder, convert(folder, tmp_path / "x.gguf")):
        assert np.abs(logits(path, tokens) - expected).max() < 1e-3
    path = convert(write_qwen2_moe(tmp_path / "other", mlp_only_layers=[], norm_topk_prob=True), tmp_path / "y.gguf")
    assert np.abs(logits(path, tokens) - expected).max() > 0.1  # the key is read


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_phi3(tmp_path, share):
    """Against mlx-lm, which has a Phi-3 of its own; within the original context its factors are not looked at there."""
    from mlx_lm.utils import load_model

    folder = write_phi3(tmp_path / "folder", partial_rotary_factor=share)
    tokens = np.random.default_rng(2).integers(0, 64, 40).tolist()
    expected = np.array(load_model(folder)[0](mx.array([tokens]))[0])
    assert expected.std() > 1
    for path in (folder, convert(folder, tmp_path / "x.gguf")):
        assert np.abs(logits(path, tokens) - expected).max() < 1e-3


def test_phi3s_factors_and_windows(tmp_path):
    """tests/peers compares the factors with llama.cpp's."""
    folder = write_phi3(tmp_path / "folder", sliding_window=9, **long_rope(8))
    for checkpoint in (FolderCheckpoint(folder), GgufCheckpoint(convert(folder, tmp_path / "x.gguf"))):
        config = build(checkpoint).config
        assert config.windows == (9, 9) and config.context == 64
        np.testing.assert_allclose(config.rope.periods, [(1 + i / 10) * 20000 ** (i / 8) for i in range(8)], rtol=1e-6)
        assert config.rope.magnitude == pytest.approx((1 + np.log(4) / np.log(64)) ** 0.5)
    folder = write_phi3(tmp_path / "long", sliding_window=256)
    for checkpoint in (FolderCheckpoint(folder), GgufCheckpoint(convert(folder, tmp_path / "y.gguf"))):
        assert build(checkpoint).config.windows == (None, None)


def test_a_dense_layer_of_qwen2_moe(tmp_path):
    folder = write_qwen2_moe(tmp_path / "folder")
    expected, found = logits(folder, [3, 9, 4, 1]), logits(convert(folder, tmp_path / "x.gguf"), [3, 9, 4, 1])
    assert np.abs(found - expected).max() < 1e-5 and expected.std() > 1


def test_layers_that_predict_further_tokens_are_left_out(made, tmp_path):
    def draft(writer):
        writer.add_nextn_predict_layers(1)
        writer.add_tensor("blk.3.nextn.eh_proj.weight", np.ones((32, 64), np.float32))

    folder = made("qwen3_5")
    plain = build(GgufCheckpoint(convert(folder, tmp_path / "x.gguf")))
    path = convert(folder, tmp_path / "y.gguf", extra=draft, layers=4)
    assert GgufCheckpoint(path).config == GgufCheckpoint(tmp_path / "x.gguf").config
    left, right = (dict(tree_flatten(m.parameters())) for m in (plain, build(GgufCheckpoint(path))))
    assert all(mx.array_equal(left[name], array) for name, array in right.items())


def test_columns_that_blocks_of_256_hold_together(made, tmp_path):
    """Qwen3.5's value heads are moved back within rows; where a block holds several heads it is unpacked for that."""
    checkpoint = GgufCheckpoint(convert(made("qwen3_5_moe"), tmp_path / "x.gguf", kind="Q8_0"))
    values = np.random.default_rng(0).standard_normal((4, 512)).astype(np.float32)
    for kind, size in (("Q8_0", 64), ("F32", 64), ("Q8_0", 16)):
        type_ = gguf.GGMLQuantizationType[kind]
        packed = gguf.quants.quantize(values, type_).view(np.uint8)
        wide = GGUFTensor("blk.0.ssm_out.weight", (4, 512), kind, 0, packed.nbytes)
        config = checkpoint.config | {"linear_value_head_dim": size, "linear_num_value_heads": 512 // size}
        order = checkpoint.arch.column_order(wide, config)
        moved = take_columns(wide, packed, order)
        assert (moved is None) == (kind == "Q8_0" and size == 16)
        if moved is not None:
            stored = gguf.quants.dequantize(packed, type_) if kind != "F32" else values
            found = gguf.quants.dequantize(moved, type_) if kind != "F32" else moved.view(np.float32)
            np.testing.assert_array_equal(found, stored[:, order])


COMPANIONS = [("adapter", "llama", "LoRA adapter"), ("mmproj", "clip", "mmproj"), (None, "clip", "mmproj")]


@pytest.mark.parametrize("kind, name, said", COMPANIONS)
def test_files_that_are_no_model(kind, name, said):
    metadata = {"general.architecture": name} | ({"general.type": kind} if kind else {})
    with pytest.raises(UnsupportedModel, match=said):
        build_config(metadata, {})


def test_other_architectures_are_refused_with_the_list():
    with pytest.raises(
        UnsupportedModel, match=f"architecture falcon is unsupported; supported: {', '.join(ARCHITECTURES)}"
    ):
        build_config({"general.architecture": "falcon"}, {})


@pytest.mark.parametrize("arch", ["gpt_oss", "qwen3_moe"])
@pytest.mark.parametrize("kind", ["MXFP4", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_stacks_of_experts(tmp_path, kind, arch):
    """Against the gguf package's own dequantiser; all of them stay packed."""
    random, type_ = np.random.default_rng(1), gguf.GGMLQuantizationType[kind]
    folder = stacked(tmp_path, arch, random)
    checkpoint = GgufCheckpoint(convert(folder, tmp_path / "x.gguf", kind=kind))
    model = build(checkpoint, dtype=mx.float32)
    plain = dict(tree_flatten(build(checkpoint, dtype=mx.float32, dequantise=True).parameters()))
    given = spelled(json.loads((folder / "config.json").read_text()))
    arrays = {k: np.array(v) for k, v in mx.load(str(folder / "model.safetensors")).items()}
    compared = 0
    for name, value in tensors(given, arrays):
        if ".experts." not in name or name.endswith("bias"):
            continue
        module = dict(model.named_modules())[name.removesuffix(".weight")]
        assert isinstance(module, QuantizedExpertLinear) and module.weight.dtype == mx.uint32
        stored = gguf.quants.dequantize(gguf.quants.quantize(np.ascontiguousarray(value), type_), type_)
        np.testing.assert_allclose(np.array(plain[name]), stored, atol=1e-6, err_msg=name)
        compared += 1
    assert compared == 6


def stacked(folder: Path, arch: str, random) -> Path:
    """Two layers whose rows are whole blocks of 32."""
    folder = folder / arch
    folder.mkdir()
    config = {
        "model_type": arch, "hidden_size": 64, "intermediate_size": 32, "moe_intermediate_size": 32, "head_dim": 32,
        "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2, "num_experts": 3,
        "num_experts_per_tok": 2, "norm_topk_prob": True, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "vocab_size": 32,
        "max_position_embeddings": 64, "sliding_window": 4, "use_sliding_window": False, "tie_word_embeddings": False,
    }  # fmt: skip
    config |= {"layer_types": ["sliding_attention", "full_attention"]} if arch == "gpt_oss" else {}
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens.weight": (32, 64), "model.norm.weight": (64,), "lm_head.weight": (32, 64)}
    biased = arch == "gpt_oss"
    for i in range(2):
        here = f"model.layers.{i}."
        shapes |= {f"{here}{n}_layernorm.weight": (64,) for n in ("input", "post_attention")}
        for n, shape in (("q", (64, 64)), ("k", (32, 64)), ("v", (32, 64)), ("o", (64, 64))):
            shapes[f"{here}self_attn.{n}_proj.weight"] = shape
            shapes |= {f"{here}self_attn.{n}_proj.bias": shape[:1]} if biased else {}
        if biased:
            shapes |= {
                f"{here}self_attn.sinks": (2,),
                f"{here}mlp.router.weight": (3, 64),
                f"{here}mlp.router.bias": (3,),
            }
            shapes |= {f"{here}mlp.experts.gate_up_proj": (3, 64, 64), f"{here}mlp.experts.gate_up_proj_bias": (3, 64)}
            shapes |= {f"{here}mlp.experts.down_proj": (3, 32, 64), f"{here}mlp.experts.down_proj_bias": (3, 64)}
        else:
            shapes |= {f"{here}self_attn.{n}_norm.weight": (32,) for n in "qk"} | {f"{here}mlp.gate.weight": (3, 64)}
            for e in range(3):
                shapes |= {f"{here}mlp.experts.{e}.{n}_proj.weight": (32, 64) for n in ("gate", "up")}
                shapes[f"{here}mlp.experts.{e}.down_proj.weight"] = (64, 32)
    arrays = {name: mx.array(random.standard_normal(shape, np.float32)) for name, shape in shapes.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)
    return folder


def changed(path: Path, change: dict) -> dict:
    """The config of a good file some of whose keys are replaced; None deletes."""
    parsed = GgufCheckpoint(path).file
    metadata = {k: v for k, v in (parsed.metadata | change).items() if v is not None}
    return build_config(metadata, parsed.tensors)


BAD = [
    ("gemma3_text", "gemma3.attention.sliding_window_pattern", [True, False], BadCheckpoint),
    ("gemma3_text", "gemma3.attention.sliding_window_pattern", [2, 0, 0, 1], BadCheckpoint),
    ("gemma3_text", "gemma3.attention.sliding_window_pattern", "2", BadCheckpoint),
    ("gemma3_text", "gemma3.attention.sliding_window_pattern", -1, BadCheckpoint),
    ("gemma3_text", "gemma3.attention.sliding_window", 0, BadCheckpoint),  # a pattern of what
    ("gemma3_text", "gemma3.attention.scale", 0.0, BadCheckpoint),
    ("gemma3_text", "gemma3.final_logit_softcapping", -1.0, BadCheckpoint),
    ("gemma3_text", "gemma3.attn_logit_softcapping", 50.0, UnsupportedModel),
    ("gemma3_text", "gemma3.rope.freq_base_swa", float("nan"), BadCheckpoint),
    ("gemma3_text", "gemma3.rope.freq_base", None, BadCheckpoint),
    ("gpt_oss", "gpt-oss.rope.freq_base", None, BadCheckpoint),
    ("qwen3_moe", "qwen3moe.rope.freq_base", None, BadCheckpoint),
    ("gemma3_text", "gemma3.expert_count", 4, UnsupportedModel),
    ("gemma3_text", "gemma3.block_count", 2**30, BadCheckpoint),
    ("gemma2", "gemma2.attn_logit_softcapping", None, BadCheckpoint),
    ("gemma2", "gemma2.final_logit_softcapping", None, BadCheckpoint),
    ("gemma2", "gemma2.attention.sliding_window", None, BadCheckpoint),
    ("gemma2", "gemma2.rope.freq_base_swa", 5.0, UnsupportedModel),
    ("qwen3_moe", "qwen3moe.expert_count", 0, BadCheckpoint),
    ("qwen3_moe", "qwen3moe.expert_used_count", None, BadCheckpoint),
    ("qwen3_moe", "qwen3moe.expert_weights_norm", 1.5, BadCheckpoint),
    ("qwen3_moe", "qwen3moe.expert_weights_scale", 2.5, UnsupportedModel),
    ("qwen3_moe", "qwen3moe.expert_gating_func", 2, UnsupportedModel),
    ("qwen3_moe", "qwen3moe.expert_shared_count", 1, UnsupportedModel),
    ("qwen3_moe", "qwen3moe.attention.sliding_window_pattern", None, UnsupportedModel),
    ("gpt_oss", "gpt-oss.attention.sliding_window", None, BadCheckpoint),
    ("gpt_oss", "gpt-oss.swiglu_clamp_exp", [1.0, 2.0, 1.0], UnsupportedModel),
    ("gpt_oss", "gpt-oss.swiglu_clamp_exp", "7", BadCheckpoint),
    ("mixtral", "llama.expert_used_count", None, BadCheckpoint),
]


@pytest.mark.parametrize("arch, key, value, error", BAD)
def test_bad_metadata(made, tmp_path, arch, key, value, error):
    path = convert(made(arch), tmp_path / "x.gguf")
    with pytest.raises(error, match=re.escape(key)):
        changed(path, {key: value})


def test_what_the_file_leaves_out(made, tmp_path):
    """What llama.cpp has in its source: periods of windows, the local theta, the scale, shares that are normalised."""
    path = convert(made("gemma3_text"), tmp_path / "x.gguf")
    silent = changed(path, {f"gemma3.{k}": None for k in ("attention.sliding_window_pattern", "rope.freq_base_swa",
                                                            "attention.scale", "final_logit_softcapping")})  # fmt: skip
    assert silent["layer_types"] == ["sliding_attention"] * 4 and silent["rope_local_base_freq"] == 10000.0
    assert silent["query_pre_attn_scalar"] == silent["head_dim"] == 8 and silent["final_logit_softcapping"] is None
    dense = changed(path, {f"gemma3.attention.{k}": None for k in ("sliding_window_pattern", "sliding_window")})
    assert dense["layer_types"] == ["full_attention"] * 4 and "sliding_window" not in dense
    path = convert(made("qwen3_moe"), tmp_path / "y.gguf")
    silent = changed(path, {f"qwen3moe.expert_{k}": None for k in ("weights_norm", "feed_forward_length")})
    assert silent["norm_topk_prob"] is True
    assert silent["moe_intermediate_size"] == GgufCheckpoint(path).config["moe_intermediate_size"]
    path = convert(made("gpt_oss"), tmp_path / "z.gguf")
    silent = changed(path, {"gpt-oss.attention.sliding_window_pattern": None, "gpt-oss.swiglu_clamp_exp": None})
    assert silent["layer_types"] == ["sliding_attention", "full_attention", "sliding_attention"]
    assert silent["swiglu_limit"] == 7.0 and silent["rope_scaling"]["truncate"] is False
    assert changed(path, {"gpt-oss.rope.scaling.type": None})["rope_scaling"] == {"rope_type": "default"}


def test_a_27b_has_a_scale_of_its_own(made, tmp_path):
    """Also: which layers see all where the file has a window and not a word on it."""
    for arch, key, layers, every in (("gemma2", "gemma2", 46, 2), ("gemma3_text", "gemma3", 62, 6)):
        path = convert(made(arch), tmp_path / f"{arch}.gguf")
        parsed = GgufCheckpoint(path).file
        many = parsed.tensors | {f"blk.{i}.x.weight": None for i in range(layers)}
        metadata = parsed.metadata | {f"{key}.block_count": layers}
        metadata.pop(f"{key}.attention.scale")
        metadata.pop(f"{key}.attention.sliding_window_pattern", None)
        config = build_config(metadata, many)
        assert config["query_pre_attn_scalar"] == 30 // 6  # hidden / heads, not the head's 8
        full = [i for i, kind in enumerate(config["layer_types"]) if kind == "full_attention"]
        assert full == list(range(every - 1, layers, every))


def test_names():
    sinks = ARCHITECTURES["gpt-oss"].rename("blk.3.attn_sinks.weight")
    assert sinks == "model.layers.3.self_attn.sinks"
    assert ARCHITECTURES["qwen3moe"].rename("blk.3.attn_sinks.weight") == "blk.3.attn_sinks.weight"
    assert ARCHITECTURES["gemma3"].rename("blk.0.ffn_norm.weight") == "model.layers.0.pre_feedforward_layernorm.weight"
    assert (
        ARCHITECTURES["gpt-oss"].rename("blk.0.ffn_gate_exps.scales") == "model.layers.0.mlp.experts.gate_proj.scales"
    )


def test_rope_factors_where_layers_turn_differently_are_left_over(made, tmp_path):
    def factors(writer):
        writer.add_tensor("rope_freqs.weight", np.ones(4, np.float32))

    path = convert(made("gemma3_text"), tmp_path / "x.gguf", extra=factors)
    with pytest.raises(BadCheckpoint, match=r"no parameter for 1 tensors \(rope_freqs.weight\)"):
        build(GgufCheckpoint(path))


def test_two_names_of_one_tensor(made, tmp_path):
    def twice(writer):
        writer.add_tensor("blk.0.ffn_norm.weight", np.ones(64, np.float32))  # gpt-oss calls it post_attention_norm

    path = convert(made("gpt_oss"), tmp_path / "x.gguf", extra=twice)
    with pytest.raises(
        BadCheckpoint, match=r"two tensors of .* are model\.layers\.0\.post_attention_layernorm\.weight"
    ):
        build(GgufCheckpoint(path))


@pytest.mark.parametrize("arch, wide", [("gemma3_text", True), ("gpt_oss", True), ("mixtral", False)])
def test_float16_that_activations_outgrow(made, tmp_path, arch, wide):
    folder, logged = made(arch, "dense" if arch == "gpt_oss" else "base"), capture_log()
    path = convert(folder, tmp_path / "x.gguf", kind="F16")
    model = build(GgufCheckpoint(path))
    assert model.dtype == (mx.bfloat16 if wide else mx.float16)
    assert len(logged) == wide and all("computed in bfloat16" in line for line in logged)
    assert build(GgufCheckpoint(path), dtype=mx.float16).dtype == mx.float16  # as asked
    assert len(logged) == wide
