"""Qwen3-MoE, Mixtral, MiniMax M2 and gpt-oss against Hugging Face (tests/parity, made by make_moe.py), and configs."""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxrt.engine.weight_size import build_skeleton, count_parameters
from mlxrt.errors import BadCheckpoint, UnsupportedModel
from mlxrt.models import find
from mlxrt.models.moe import QuantizedExpertLinear
from mlxrt.models.quantized.packed_linear import PackedExpertLinear
from mlxrt.weights.formats.folder import FolderCheckpoint
from mlxrt.weights.load.build import build
from mlxrt.weights.random_models import shape_config
from tests.parity_adapter import Stepper, batch, engine_of, logits
from tests.support.oracle import Dense

from ..support.log_lines import capture_log

FIXTURES = Path(__file__).parents[1] / "parity"
ARCHS = ("qwen3_moe", "mixtral", "minimax_m2", "gpt_oss")
META = {arch: json.loads((FIXTURES / arch / "meta.json").read_text()) for arch in ARCHS}
ROWS = [(arch, name) for arch in ARCHS for name in ("base", *META[arch]["variants"])]


def read_config(arch, variant="base"):
    return json.loads(
        (FIXTURES / arch / ("config.json" if variant == "base" else f"alt/config.{variant}.json")).read_text()
    )


def weights(arch, variant="base"):
    return FIXTURES / arch / ("model.safetensors" if variant == "base" else META[arch]["variants"][variant]["weights"])


def reference(arch, variant="base"):
    return dict(np.load(FIXTURES / arch / ("ref.npz" if variant == "base" else META[arch]["variants"][variant]["ref"])))


@pytest.fixture
def made(tmp_path):
    """A checkpoint folder from a fixture, its tensors perhaps changed on the way."""

    def make(arch, variant="base", change=None):
        folder = tmp_path / f"{arch}-{variant}-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(read_config(arch, variant)))
        source = weights(arch, variant)
        if change is None:
            shutil.copy(source, folder / "model.safetensors")
        else:
            mx.save_safetensors(str(folder / "model.safetensors"), change(mx.load(str(source))))
        return folder

    return make


def off(found, wanted):
    assert found.shape == wanted.shape
    return np.abs(found - wanted).max()


@pytest.mark.parametrize("arch, variant", ROWS)
def test_logits(made, arch, variant):
    ref, folder = reference(arch, variant), made(arch, variant)
    for key in [k.removesuffix(".logits") for k in ref if k.startswith("len") and k.endswith(".logits")]:
        assert off(logits(folder, ref[f"{key}.tokens"].tolist()), ref[f"{key}.logits"]) < 1e-3
    assert off(logits(folder, ref["long.tokens"].tolist())[ref["long.pos"]], ref["long.logits"]) < 1e-3


@pytest.mark.parametrize("arch", ARCHS)
def test_fed_in_pieces_and_cut_back(made, arch):
    ref, stepper = reference(arch), Stepper(made(arch))
    tokens = ref["len64.tokens"].tolist()
    for sizes in ([5, 1, 30, 28], [1] * 64):
        stepper.reset()
        ends = np.cumsum(sizes)
        rows = np.concatenate([stepper.feed(tokens[end - n : end]) for n, end in zip(sizes, ends)])
        assert off(rows, ref["len64.logits"]) < 1e-3
    for name in [k.removesuffix(".keep") for k in ref if k.endswith(".keep")]:
        base, keep, suffix = (ref[f"{name}.{part}"].tolist() for part in ("base", "keep", "suffix"))
        stepper.reset()
        stepper.feed(base)
        assert stepper.trim(len(base) - keep)
        assert off(stepper.feed(suffix), ref[f"{name}.logits"]) < 1e-3


@pytest.mark.parametrize("arch", ARCHS)
def test_greedy_together(made, arch):
    ref, folder = reference(arch), made(arch)
    found = batch(folder, [ref[f"len{n}.tokens"].tolist() for n in (7, 64, 1, 33)], 24)
    assert found == [ref[f"greedy{n}.tokens"].tolist() for n in (7, 64, 1, 33)]
    experts = [layer.mlp.experts for layer in engine_of(folder).model.model.layers if "experts" in layer.mlp]
    assert experts and all("gate_up_proj" in one for one in experts)


# Layouts


def test_gpt_oss_experts_stay_packed(made):
    tokens, ref = reference("gpt_oss")["len33.tokens"].tolist(), reference("gpt_oss")["len33.logits"]
    model = build(FolderCheckpoint(made("gpt_oss")), dtype=mx.float32)
    for layer in model.model.layers:
        for name in ("gate_proj", "up_proj", "down_proj"):
            module = layer.mlp.experts[name]
            assert isinstance(module, QuantizedExpertLinear) and module.mode == "mxfp4"
            assert module.weight.dtype == mx.uint32 and module.scales.dtype == mx.uint8
    model.fuse()
    assert off(dense_logits(model, tokens), ref) < 1e-3


def test_published_gpt_oss_is_computed_packed(made):
    """By CPU kernels where there are any, without being asked: dequantised experts of gpt-oss-20b would take 80 GB."""
    tokens, ref = reference("gpt_oss")["len33.tokens"].tolist(), reference("gpt_oss")["len33.logits"]
    folder = made("gpt_oss")
    assert off(logits(folder, tokens), ref) < 1e-3
    model = engine_of(folder).model
    if model.kernels.cpu is None:
        pytest.skip("no CPU kernels here")
    for layer in model.model.layers:
        experts = [module for module in layer.mlp.experts.modules() if isinstance(module, PackedExpertLinear)]
        assert len(experts) == 2 and all(module.matrix.mode == "mxfp4" for module in experts)


def converted(arrays):
    """As mlx-lm names and stacks experts."""
    out, stacks = {}, {}
    for name, array in arrays.items():
        for old, new in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
            name = name.replace(f".{old}.", f".{new}.")
        before, inside, after = name.partition(".experts.")
        if inside:
            number, _, rest = after.partition(".")
            stacks.setdefault(f"{before}.switch_mlp.{rest}", {})[int(number)] = array
        else:
            out[name] = array
    return out | {name: mx.stack([parts[i] for i in range(len(parts))]) for name, parts in stacks.items()}


@pytest.mark.parametrize("arch", ["qwen3_moe", "mixtral", "minimax_m2"])
def test_converted_for_mlx(made, arch):
    ref = reference(arch)
    folder = made(arch, change=converted)
    assert off(logits(folder, ref["len33.tokens"].tolist()), ref["len33.logits"]) < 1e-3


def quantised(arrays, pack):
    """The dense gpt-oss fixture, whose rows are whole groups of 32, with experts and the router in 4 and 8 bit."""
    out = {}
    for name, array in arrays.items():
        stem = name.removesuffix(".weight")
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            rows = array.swapaxes(1, 2)
            halves = {"gate_proj": rows[:, ::2], "up_proj": rows[:, 1::2]} if "gate_up" in name else {"down_proj": rows}
            for part, matrix in halves.items():
                out |= parts(f"{name.rpartition('.')[0]}.{part}", matrix, 4, pack)
        elif name.endswith("experts.gate_up_proj_bias"):
            stem = name.removesuffix("gate_up_proj_bias")
            out |= {f"{stem}gate_proj.bias": array[:, ::2], f"{stem}up_proj.bias": array[:, 1::2]}
        elif name.endswith("experts.down_proj_bias"):
            out[name.replace("_bias", ".bias")] = array
        else:
            out |= parts(stem, array, 8, pack) if name.endswith("router.weight") else {name: array}
    return out


def parts(path, matrix, bits, pack):
    packed = mx.quantize(matrix, 32, bits)
    if pack:
        return {f"{path}.{part}": array for part, array in zip(("weight", "scales", "biases"), packed)}
    return {f"{path}.weight": mx.dequantize(*packed, 32, bits)}


def test_affine_stacks_stay_packed(made):
    tokens = reference("gpt_oss")["len33.tokens"].tolist()
    found = []
    for pack in (True, False):
        folder = made("gpt_oss", "dense", lambda arrays, pack=pack: quantised(arrays, pack))
        model = build(FolderCheckpoint(folder), dtype=mx.float32)
        held = [name for name, array in tree_flatten(model.parameters()) if array.dtype == mx.uint32]
        assert len(held) == (4 * len(model.model.layers) if pack else 0)
        model.fuse()
        found.append(dense_logits(model, tokens))
    assert off(*found) < 1e-3


class View(Dense):
    """Sinks as one more key that no value belongs to."""

    def attend(self, q, k, v, *, scale, softcap=None, sinks=None):
        assert softcap is None
        if sinks is None:
            return super().attend(q, k, v, scale=scale)
        at, far = self.positions[:, None], self.positions[None]
        seen = (far <= at) & (far > at - (self.spec.window or 1 << 30))
        k, v = (mx.repeat(x, q.shape[1] // x.shape[1], axis=1).swapaxes(0, 1) for x in (k, v))
        scores = mx.where(seen, (q.swapaxes(0, 1) * scale) @ k.swapaxes(1, 2), mx.array(-mx.inf, q.dtype))
        scores = mx.concatenate([scores, mx.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))], axis=-1)
        return (mx.softmax(scores, axis=-1)[..., :-1] @ v).swapaxes(0, 1)


def dense_logits(model, tokens):
    views = [View(spec, len(tokens)) for spec in model.cache_specs()]
    return np.array(model.logits(model(mx.array(tokens), views)))


@pytest.mark.parametrize("length", [1, 40])
@pytest.mark.parametrize("arch, variant", [*((arch, "base") for arch in ARCHS), ("minimax_m2", "fp8")])
def test_nothing_widens_the_residual_stream(made, arch, variant, length):
    model = build(FolderCheckpoint(made(arch, variant)), dtype=mx.bfloat16)
    model.fuse()
    h = model.model.embed_tokens(mx.arange(length))
    for layer, spec in zip(model.model.layers, model.cache_specs()):
        assert layer.self_attn(layer.input_layernorm(h), View(spec, length)).dtype == mx.bfloat16
        assert layer.mlp(layer.post_attention_layernorm(h)).dtype == mx.bfloat16
        h = layer(h, View(spec, length))
        assert h.dtype == mx.bfloat16
    assert model.logits(model.model.norm(h)).dtype == mx.bfloat16


def test_minimax_routes_in_float32(made):
    model = build(FolderCheckpoint(made("minimax_m2")), dtype=mx.bfloat16)
    mlp = model.model.layers[0].mlp
    assert mlp.gate.weight.dtype == mlp.e_score_correction_bias.dtype == mx.float32
    assert mlp.experts.gate_proj.weight.dtype == model.model.layers[0].self_attn.q_norm.weight.dtype == mx.bfloat16


def test_fp8_says_what_it_costs(made):
    said = capture_log()
    build(FolderCheckpoint(made("minimax_m2", "fp8")), dtype=mx.bfloat16)
    assert len(said) == 1 and "FP8" in said[0] and "bfloat16" in said[0]


@pytest.mark.parametrize(
    "name, array, words",
    [
        ("gate_up_proj_blocks", mx.zeros((3, 64, 2, 8), mx.uint8), "not the layout of gpt_oss"),
        ("gate_up_proj_blocks", mx.zeros((3, 64, 2, 16), mx.int32), "not the layout of gpt_oss"),
        ("down_proj_bias", mx.zeros((64,)), "not the layout of gpt_oss"),
        ("down_proj_scales", mx.zeros((3, 64, 1)), "float32 scales without biases"),
        ("down_proj", mx.zeros((3, 32, 64)), "twice"),
        ("other", mx.zeros((3,)), "no parameter for 1 tensors"),
    ],
)
def test_damaged_gpt_oss_tensors(made, name, array, words):
    folder = made("gpt_oss", change=lambda arrays: arrays | {f"model.layers.1.mlp.experts.{name}": array})
    with pytest.raises(BadCheckpoint, match=words):
        build(FolderCheckpoint(folder))


# Configs


def parse(arch, **changes):
    raw = read_config(arch) | changes
    raw = {key: value for key, value in raw.items() if value != "absent"}
    return find(raw).parse(raw)


@pytest.mark.parametrize("arch, variant", ROWS)
def test_every_key_is_known(arch, variant):
    raw, said = read_config(arch, variant), capture_log()
    find(raw).parse(raw)
    assert said == []


# The tables of facts/shapes.md; MiniMax's is the sum over its published shapes.
TOTALS = {"qwen3-30b-a3b": 30.5, "gpt-oss-20b": 20.9, "gpt-oss-120b": 116.8, "mixtral-8x7b": 46.7, "minimax-m2": 228.7}


@pytest.mark.parametrize("name, billions", TOTALS.items())
def test_published(name, billions):
    raw, said = shape_config(name), capture_log()
    find(raw).parse(raw)
    assert said == []
    assert count_parameters(build_skeleton(raw)) / 1e9 == pytest.approx(billions, rel=0.01)


def test_both_spellings():
    assert parse("mixtral") == parse("mixtral", num_local_experts="absent", num_experts=5)
    assert parse("gpt_oss") == parse("gpt_oss", num_experts_per_tok="absent", experts_per_token=2)
    half = {"partial_rotary_factor": 0.75, "rope_theta": 20000.0, "rope_type": "default"}
    assert parse("minimax_m2") == parse("minimax_m2", rotary_dim="absent", rope_theta="absent", rope_parameters=half)


def test_layers():
    assert [parse("qwen3_moe").has_experts(i) for i in range(4)] == [False, True, False, True]
    assert [parse("qwen3_moe", decoder_sparse_step=1, mlp_only_layers=[2]).has_experts(i) for i in range(4)] == [
        True,
        True,
        False,
        True,
    ]
    assert (
        parse("qwen3_moe").windows == (5,) * 4 and parse("qwen3_moe", use_sliding_window=False).windows == (None,) * 4
    )
    assert parse("gpt_oss", layer_types="absent").windows == (5, None, 5)


def test_gpt_oss_without_scaling_is_yarn():
    rope = parse("gpt_oss", rope_scaling="absent").rope
    assert rope.kind == "yarn" and rope == parse("gpt_oss", rope_scaling=None).rope


@pytest.mark.parametrize(
    "arch, changes, words",
    [
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func.*softmax"),
        ("minimax_m2", {"qk_norm_type": "per_head"}, "qk_norm_type"),
        ("minimax_m2", {"attn_type_list": [1, 0]}, "attn_type_list"),
        ("minimax_m2", {"attn_type_list": 1}, "attn_type_list"),
        ("minimax_m2", {"shared_intermediate_size": 64}, "shared_intermediate_size"),
        ("minimax_m2", {"sliding_window": 8}, "sliding_window"),
        ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act"),
        ("mixtral", {"rope_scaling": {"rope_type": "odd"}}, "odd"),
    ],
)
def test_another_architecture(arch, changes, words):
    with pytest.raises(UnsupportedModel, match=words):
        parse(arch, **changes)


@pytest.mark.parametrize(
    "arch, changes, words",
    [
        *((arch, {"rope_theta": "absent"}, "rope_theta") for arch in ARCHS),
        ("qwen3_moe", {"num_experts": "absent"}, "num_experts"),
        ("qwen3_moe", {"moe_intermediate_size": "absent"}, "moe_intermediate_size"),
        ("qwen3_moe", {"num_local_experts": 9}, "num_local_experts = 9 contradicts num_experts = 5"),
        ("qwen3_moe", {"mlp_only_layers": [1.5]}, "mlp_only_layers"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ("qwen3_moe", {"sliding_window": None}, "sliding_window"),
        ("mixtral", {"num_experts_per_tok": 6}, "num_experts_per_tok = 6 of only 5"),
        ("mixtral", {"num_local_experts": 10**400}, "num_experts"),
        ("minimax_m2", {"partial_rotary_factor": 0.5}, "contradict"),
        ("minimax_m2", {"rotary_dim": 18}, "18 of a head's 16"),
        ("minimax_m2", {"rotary_dim": "12"}, "rotary_dim"),
        ("gpt_oss", {"swiglu_limit": 0}, "swiglu_limit"),
        ("gpt_oss", {"swiglu_limit": "7"}, "swiglu_limit"),
        ("gpt_oss", {"layer_types": "absent", "sliding_window": None}, "sliding_window"),
    ],
)
def test_damaged_configs(arch, changes, words):
    with pytest.raises(BadCheckpoint, match=words):
        parse(arch, **changes)
