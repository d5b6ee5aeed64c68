"""Qwen3-Next and Qwen3.5 against Hugging Face transformers (tests/parity/make_hybrid.py), and their configs."""

import json
import re
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxrt.errors import BadCheckpoint, UnsupportedModel
from mlxrt.models import find
from mlxrt.weights.formats.folder import FolderCheckpoint
from mlxrt.weights.load.build import build
from mlxrt.weights.random_models import shape_config
from tests.parity_adapter import Stepper, batch, engine_of, logits
from tests.support.oracle import Dense

from ..support.log_lines import capture_log

FIXTURES = Path(__file__).parents[1] / "parity"
ARCHS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
SLACK = 64  # tokens that may be computed again after a cut: one checkpoint's stride


def variants():
    metas = {arch: json.loads((FIXTURES / arch / "meta.json").read_text()) for arch in ARCHS}
    return [(arch, name) for arch, meta in metas.items() for name in ("base", *meta["variants"])]


@pytest.fixture
def made(tmp_path):
    """A checkpoint folder from a fixture, its tensors and config perhaps changed on the way."""

    def make(arch, variant="base", change=None, config=None):
        folder, home = tmp_path / f"{arch}-{variant}", FIXTURES / arch
        folder.mkdir()
        raw = json.loads((home / ("config.json" if variant == "base" else f"alt/config.{variant}.json")).read_text())
        (folder / "config.json").write_text(json.dumps(config(raw) if config else raw))
        if change is None:
            shutil.copy(home / "model.safetensors", folder)
        else:
            mx.save_safetensors(str(folder / "model.safetensors"), change(mx.load(str(home / "model.safetensors"))))
        return folder

    return make


def reference(arch, variant="base"):
    own = FIXTURES / arch / f"alt/ref.{variant}.npz"
    return dict(np.load(own if own.exists() else FIXTURES / arch / "ref.npz"))


def off(found, wanted):
    assert found.shape == wanted.shape
    return np.abs(found - wanted).max()


def singles(arrays):
    """Fused experts as one tensor each, which is how transformers 5 saves them."""
    out = {}
    for name, array in arrays.items():
        kind = name.rpartition(".experts.")[2]
        if kind not in ("gate_up_proj", "down_proj"):
            out[name] = array
            continue
        stem = name.removesuffix(kind)
        parts = (
            dict(zip(("gate_proj", "up_proj"), mx.split(array, 2, axis=1))) if kind == "gate_up_proj" else {kind: array}
        )
        out |= {f"{stem}{e}.{part}.weight": a[e] for part, a in parts.items() for e in range(a.shape[0])}
    return out


@pytest.mark.parametrize("arch, variant", variants())
def test_logits(made, arch, variant):
    ref = reference(arch, variant)
    folder = made(arch, variant, singles if (arch, variant) == ("qwen3_5_moe", "v5") else None)
    for key in [k.removesuffix(".logits") for k in ref if k.startswith("len") and k.endswith(".logits")]:
        assert off(logits(folder, ref[f"{key}.tokens"].tolist()), ref[f"{key}.logits"]) < 1e-3
    assert off(logits(folder, ref["long.tokens"].tolist())[ref["long.pos"]], ref["long.logits"]) < 1e-3


def fed(stepper, tokens, sizes):
    before, rows, at = stepper.computed(), [], 0
    while at < len(tokens):
        n = sizes[len(rows) % len(sizes)]
        rows.append(stepper.feed(tokens[at : at + n]))
        at += n
    assert stepper.computed() - before <= len(tokens) + SLACK
    return np.concatenate(rows)


@pytest.mark.parametrize("arch", ARCHS)
def test_fed_in_pieces(made, arch):
    ref, stepper = reference(arch), Stepper(made(arch))
    for sizes in ((5, 1, 9, 2), (17,), (1,), (63, 1)):
        stepper.reset()
        assert off(fed(stepper, ref["len64.tokens"].tolist(), sizes), ref["len64.logits"]) < 1e-3
    stepper.reset()
    assert off(fed(stepper, ref["long.tokens"].tolist(), (37,))[ref["long.pos"]], ref["long.logits"]) < 1e-3


@pytest.mark.parametrize("arch", ARCHS)
def test_cut_back_forked_and_restored(made, arch):
    ref, stepper = reference(arch), Stepper(made(arch))
    for name in [k.removesuffix(".keep") for k in ref if k.endswith(".keep")]:
        base, keep, suffix = (ref[f"{name}.{part}"].tolist() for part in ("base", "keep", "suffix"))
        for sizes in ((33,), (20, 1, 1, 1, 1, 1, 1, 1)):
            stepper.reset()
            fed(stepper, base, sizes)
            assert stepper.trim(len(base) - keep)
            assert off(fed(stepper, suffix, (1,)), ref[f"{name}.logits"]) < 1e-3
    stepper.reset()
    fed(stepper, ref["reuse_fork.base"].tolist(), (20, 1))
    other = stepper.fork()
    fed(stepper, ref["len7.tokens"].tolist(), (1,))
    assert off(fed(other, ref["reuse_fork.suffix"].tolist(), (1,)), ref["reuse_fork.logits"]) < 1e-3
    stepper.reset()
    fed(stepper, ref["reuse_fork.base"].tolist(), (20, 1))
    stepper.roundtrip()
    assert off(fed(stepper, ref["reuse_fork.suffix"].tolist(), (4,)), ref["reuse_fork.logits"]) < 1e-3


def test_a_long_text_is_cut_back_at_a_checkpoint(made):
    ref, stepper = reference("qwen3_next"), Stepper(made("qwen3_next"))
    tokens = ref["long.tokens"].tolist()
    whole = fed(stepper, tokens, (300,))
    assert stepper.trim(100)
    assert off(fed(stepper, tokens[200:], (50,)), whole[200:]) < 1e-3


@pytest.mark.parametrize("arch", ARCHS)
def test_greedy_together(made, arch):
    ref, folder = reference(arch), made(arch)
    found = batch(folder, [ref[f"len{n}.tokens"].tolist() for n in (7, 64, 1, 33)], 24)
    assert found == [ref[f"greedy{n}.tokens"].tolist() for n in (7, 64, 1, 33)]


# Checkpoints converted for MLX: other names, convolutions turned, norms with the 1 added (by most)


def norm_less_one(name):
    return name.endswith("norm.weight") and "linear_attn" not in name and "visual" not in name and "mtp" not in name


def converted(arch, gains=1.0):
    def change(arrays):
        out = {}
        for name, array in arrays.items():
            if name.startswith(("model.visual.", "mtp.")):
                continue
            if arch != "qwen3_next":
                name = f"language_model.{name.replace('model.language_model.', 'model.')}"
            if "conv1d" in name:
                array = array.swapaxes(1, 2)
            out[name] = array + gains if norm_less_one(name) else array
        return stacked(out)

    return change


def stacked(arrays):
    """MLX's stacks of experts, from whichever of the other two layouts."""
    arrays, stacks, out = singles(arrays), {}, {}
    for name, array in arrays.items():
        before, inside, after = name.partition(".experts.")
        if inside:
            number, _, rest = after.partition(".")
            stacks.setdefault(f"{before}.switch_mlp.{rest}", {})[int(number)] = array
        else:
            out[name] = array
    return out | {name: mx.stack([parts[i] for i in range(len(parts))]) for name, parts in stacks.items()}


@pytest.mark.parametrize("gains", [1.0, 0.0])
@pytest.mark.parametrize("arch", ARCHS)
def test_converted_for_mlx(made, arch, gains):
    ref = reference(arch)
    found = logits(made(arch, change=converted(arch, gains)), ref["len33.tokens"].tolist())
    assert off(found, ref["len33.logits"]) < 1e-3


def packs(name, array):
    return array.ndim > 1 and array.shape[-1] % 32 == 0 and "conv1d" not in name and name.endswith(".weight")


@pytest.mark.parametrize("arch", ARCHS)
def test_packed(made, arch):
    """Rows are taken apart and stacked while packed; the truth has the same values as plain numbers."""

    def pack(arrays):
        out = {}
        for name, array in converted(arch)(arrays).items():
            if packs(name, array):
                parts = zip(("weight", "scales", "biases"), mx.quantize(array, 32, 4))
                out |= {f"{name.removesuffix('.weight')}.{part}": a for part, a in parts}
            else:
                out[name] = array
        return out

    def rounded(arrays):
        arrays = converted(arch)(arrays)
        same = {name: mx.dequantize(*mx.quantize(a, 32, 4), 32, 4) for name, a in arrays.items() if packs(name, a)}
        return arrays | same

    tokens = reference(arch)["len33.tokens"].tolist()
    folder = made(arch, "base", pack)
    model = build(FolderCheckpoint(folder), dtype=mx.float32)
    held = {name for name, a in tree_flatten(model.parameters()) if a.dtype == mx.uint32}
    assert any("linear_attn.in_proj_qkv" in name for name in held) and any("q_proj" in name for name in held)
    assert arch == "qwen3_5" or any("experts.gate_proj" in name for name in held)
    found = dense_logits(model, tokens)
    shutil.rmtree(folder)
    plain = build(FolderCheckpoint(made(arch, "base", rounded)), dtype=mx.float32)
    assert off(found, dense_logits(plain, tokens)) < 1e-3


def dense_logits(model, tokens):
    views = [Dense(spec, len(tokens)) for spec in model.cache_specs()]
    return np.array(model.logits(model(mx.array(tokens), views)))


@pytest.mark.parametrize("length", [1, 40])
@pytest.mark.parametrize("arch", ARCHS)
def test_nothing_widens_the_residual_stream(made, arch, length):
    model = build(FolderCheckpoint(made(arch)), dtype=mx.bfloat16)
    model.fuse()
    h = model.model.embed_tokens(mx.arange(length))
    for layer, spec in zip(model.model.layers, model.cache_specs()):
        mixer = layer.linear_attn if "linear_attn" in layer else layer.self_attn
        assert mixer(layer.input_layernorm(h), Dense(spec, length)).dtype == mx.bfloat16
        assert layer.mlp(layer.post_attention_layernorm(h)).dtype == mx.bfloat16
        h = layer(h, Dense(spec, length))
        assert h.dtype == mx.bfloat16
    assert model.logits(model.model.norm(h)).dtype == mx.bfloat16


def test_what_is_compared_is_fused(made):
    layers = engine_of(made("qwen3_5")).model.model.layers
    assert "qkv_proj" in layers[0].self_attn and all("in_proj" in layer.linear_attn for layer in layers[1:])


# Configs


def parse(arch, text=None, **changes):
    raw = json.loads((FIXTURES / arch / "config.json").read_text())
    target = raw["text_config"] if text else raw
    for key, value in ((text or {}) | changes).items():
        target[key] = value
        if value == "absent":
            del target[key]
    return find(raw).parse(raw)


@pytest.mark.parametrize("arch, variant", variants())
def test_every_key_is_known(arch, variant):
    name = "config.json" if variant == "base" else f"alt/config.{variant}.json"
    raw, said = json.loads((FIXTURES / arch / name).read_text()), capture_log()
    find(raw).parse(raw)
    assert said == []


def test_the_text_part_alone():
    raw = json.loads((FIXTURES / "qwen3_5_moe" / "config.json").read_text())
    assert find(raw["text_config"]).parse(raw["text_config"]) == parse("qwen3_5_moe")


def test_which_layers():
    full, linear = "full_attention", "linear_attention"
    assert parse("qwen3_next").layer_types == (linear, full) * 2
    assert parse("qwen3_next", full_attention_interval="absent").layer_types == (linear,) * 3 + (full,)
    assert [parse("qwen3_next").has_experts(i) for i in range(4)] == [True, False, True, True]
    assert [parse("qwen3_next", decoder_sparse_step=2, mlp_only_layers=[]).has_experts(i) for i in range(4)] == [
        False,
        True,
    ] * 2


def test_rotary_dim():
    assert parse("qwen3_next").rope.dim == 8
    assert parse("qwen3_next", partial_rotary_factor="absent").rope.dim == 4
    assert parse("qwen3_next", rope_theta="absent", rope_parameters={"rope_theta": 9.0}).rope.dim == 8


@pytest.mark.parametrize(
    "arch, changes, words",
    [
        ("qwen3_next", {"hidden_act": "gelu"}, "hidden_act.*gelu"),
        ("qwen3_next", {"use_sliding_window": True}, "use_sliding_window"),
        ("qwen3_next", {"mlp_bias": True}, "mlp_bias"),
        ("qwen3_next", {"layer_types": ["sliding_attention"] * 4}, "sliding_attention"),
        ("qwen3_next", {"rope_scaling": {"rope_type": "odd"}}, "odd"),
        ("qwen3_5", {"text": {"attn_output_gate": False}}, "attn_output_gate"),
        ("qwen3_5", {"text": {"num_experts": 8}}, "num_experts"),
        ("qwen3_5_moe", {"text": {"norm_topk_prob": False}}, "norm_topk_prob"),
        ("qwen3_5_moe", {"text": {"mlp_only_layers": [1]}}, "mlp_only_layers"),
    ],
)
def test_a_known_key_with_an_unsupported_value(arch, changes, words):
    with pytest.raises(UnsupportedModel, match=words):
        parse(arch, **changes)


@pytest.mark.parametrize(
    "arch, changes, words",
    [
        ("qwen3_next", {"rope_theta": "absent"}, "rope_theta"),
        ("qwen3_next", {"linear_key_head_dim": "absent"}, "linear_key_head_dim"),
        ("qwen3_next", {"num_experts": "absent"}, "num_experts"),
        ("qwen3_next", {"intermediate_size": "absent"}, "intermediate_size"),
        ("qwen3_next", {"linear_num_value_heads": 5}, "linear_num_value_heads 5.*linear_num_key_heads 2"),
        ("qwen3_next", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
        ("qwen3_next", {"linear_conv_kernel_dim": True}, "linear_conv_kernel_dim"),
        ("qwen3_next", {"num_experts_per_tok": 6}, "num_experts_per_tok"),
        ("qwen3_next", {"mlp_only_layers": ["1"]}, "mlp_only_layers"),
        ("qwen3_next", {"layer_types": ["full_attention"]}, "layer_types"),
        ("qwen3_next", {"full_attention_interval": 0}, "full_attention_interval"),
        ("qwen3_next", {"partial_rotary_factor": 0.01}, "0 of a head's 16"),
        ("qwen3_next", {"partial_rotary_factor": "half"}, "partial_rotary_factor"),
        ("qwen3_5", {"text_config": [1]}, "text_config"),
        ("qwen3_5", {"text": {"rope_parameters": {"rope_type": "default"}}}, "rope_theta"),
    ],
)
def test_damaged_values_are_refused(arch, changes, words):
    with pytest.raises(BadCheckpoint, match=words):
        parse(arch, **changes)


def test_an_unknown_key_is_printed_once():
    for changes in ({"flux": 1}, {"text": {"flux": 1}}):
        said = capture_log()
        parse("qwen3_5", **changes)
        assert len(said) == 1 and "flux" in said[0]


@pytest.mark.parametrize(
    "name, damage",
    [
        ("linear_attn.in_proj_ba.weight", lambda a: a[:-1]),
        ("linear_attn.in_proj_qkvz.weight", lambda a: a[:, :0]),
        ("linear_attn.conv1d.weight", lambda a: a[:-1]),
        ("input_layernorm.weight", lambda a: a.astype(mx.uint8)),
        ("input_layernorm.weight", lambda a: a[:0]),
    ],
)
def test_misshapen_tensors_are_named(made, name, damage):
    name = f"model.layers.0.{name}"
    folder = made("qwen3_next", change=lambda arrays: arrays | {name: damage(arrays[name])})
    stem = re.escape(re.sub(r"(qkvz|ba)\.weight$", "", name))  # what is taken apart is named by its parts
    with pytest.raises(BadCheckpoint, match=stem):
        build(FolderCheckpoint(folder), dtype=mx.float32)


def attention(h, heads, kv, d):
    return 2 * heads * d * h + 2 * kv * d * h + heads * d * h + 2 * d


def delta(h, keys, values, d, conv):
    mixed = 2 * keys * d + values * d
    return h * (mixed + values * d + 2 * values) + mixed * conv + 2 * values + d + values * d * h


def experts(h, count, width, shared):
    return h * count + 3 * count * h * width + 3 * h * shared + h


@pytest.mark.parametrize(
    "name, total",
    [
        ("qwen3.5-9b", 2 * 248320 * 4096 + 4096 + 32 * (2 * 4096 + 3 * 4096 * 12288)
         + 8 * attention(4096, 16, 4, 256) + 24 * delta(4096, 16, 32, 128, 4)),
        ("qwen3.5-35b-a3b", 2 * 248320 * 2048 + 2048 + 40 * (2 * 2048 + experts(2048, 256, 512, 512))
         + 10 * attention(2048, 16, 2, 256) + 30 * delta(2048, 16, 32, 128, 4)),
    ],
)  # fmt: skip
def test_published_shapes(name, total):
    raw, said = shape_config(name), capture_log()
    family = find(raw)
    model = family(family.parse(raw))  # lazy: nothing is allocated
    assert (sum(a.size for _, a in tree_flatten(model.parameters())), said) == (total, [])
