"""Gemma 2, 3 and 4 against what Hugging Face computed (tests/parity/gemma*, made by make_gemma.py)."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import mlxrt
from mlxrt.cache.memory import PagedKV, Shared, WindowKV
from mlxrt.engine.engine import Engine
from mlxrt.errors import BadCheckpoint
from mlxrt.models import find
from mlxrt.models.multimodal import rename_text_tensor
from mlxrt.weights import FolderCheckpoint, build

from .. import parity_adapter as adapter
from ..support.log_lines import capture_log

HERE = Path(__file__).parents[1] / "parity"
SHARED = Path(__file__).parents[3] / "shared/fixtures/parity"
ARCHS = ("gemma2", "gemma3_text", "gemma3_mm", "gemma4_e2b", "gemma4_mm", "gemma4_moe")
TENSORS = "model.safetensors"


def config_of(arch, variant="config.json"):
    return json.loads((HERE / arch / variant).read_text())


def parse(raw):
    return find(raw).parse(raw)


@pytest.fixture(params=ARCHS)
def arch(request):
    return request.param


@pytest.fixture
def ref(arch):
    return np.load(HERE / arch / "ref.npz")


def tolerance(arch):
    return max(1e-3, 4 * json.loads((HERE / arch / "meta.json").read_text())["stats"]["noise_f32_vs_f64"])


def test_logits(arch, ref):
    for name in ("len1", "len33"):
        found = adapter.logits(HERE / arch, ref[f"{name}.tokens"].tolist())
        assert np.abs(found - ref[f"{name}.logits"]).max() < tolerance(arch)
    found = adapter.logits(HERE / arch, ref["long.tokens"].tolist())[ref["long.pos"]]
    assert np.abs(found - ref["long.logits"]).max() < tolerance(arch)


def test_cut_back_behind_the_window(arch, ref):
    stepper = adapter.Stepper(HERE / arch)
    base, keep = ref["reuse_wrap13.base"].tolist(), int(ref["reuse_wrap13.keep"])
    for token in base[:9]:
        stepper.feed([token])
    stepper.feed(base[9:])
    assert stepper.trim(len(base) - keep)
    found = stepper.feed(ref["reuse_wrap13.suffix"].tolist())
    assert np.abs(found - ref["reuse_wrap13.logits"]).max() < tolerance(arch)


def test_batch(arch, ref):
    lengths = (1, 7, 33)
    found = adapter.batch(HERE / arch, [ref[f"len{n}.tokens"].tolist() for n in lengths], 12)
    assert found == [ref[f"greedy{n}.tokens"][:12].tolist() for n in lengths]


def test_both_spellings_are_one_config(arch):
    """As published, and as transformers 5 writes it again."""
    old, new = (parse(config_of(arch, v)) for v in ("config.json", "alt/config.v5.json"))
    assert replace(old, layer_types=None) == replace(new, layer_types=None)


def test_nothing_is_said_about_known_keys(arch):
    for variant in ("config.json", "alt/config.v5.json"):
        said = capture_log()
        parse(config_of(arch, variant))
        assert said == []


def test_bfloat16_stays(arch, monkeypatch):
    """With bfloat16 weights, every module answers in bfloat16. Only the router's weights, one per expert, do not."""
    seen = {}
    config = mlxrt.EngineConfig(dtype="bfloat16", kv_memory="64M")
    with mlxrt.load(str(HERE / arch), config) as engine:
        for kind in {type(module) for module in engine.model.modules()} - {type(engine.model), list}:
            if "__call__" in vars(kind):
                monkeypatch.setattr(kind, "__call__", spied(kind.__call__, kind.__name__, seen))
        engine.score(list(range(9)))
        caps = {"logits": engine.model.logits(mx.zeros((1, engine.model.config.hidden_size), mx.bfloat16)).dtype}
    assert {"RMSNorm", "Linear", "Embedding", "RoPE"} <= set(seen)
    routed = seen.pop("Router", None)
    assert (routed is not None) == (arch == "gemma4_moe")
    assert {name: kinds for name, kinds in seen.items() if kinds != {mx.bfloat16}} == {}
    assert caps == {"logits": mx.bfloat16}


def spied(call, name, seen):
    def spy(self, *args, **kwargs):
        out = call(self, *args, **kwargs)
        seen.setdefault(name, set()).update({out.dtype} if isinstance(out, mx.array) else {o.dtype for o in out})
        return out

    return spy


def copied(arch, folder, change):
    """The checkpoint of `arch` with other tensors."""
    shutil.copy(HERE / arch / "config.json", folder / "config.json")
    mx.save_safetensors(str(folder / TENSORS), change(dict(mx.load(str(HERE / arch / TENSORS)))))
    return folder


def scored(folder):
    config = mlxrt.EngineConfig(dtype="float32", kv_memory="64M")
    with mlxrt.load(str(folder), config) as engine:
        return np.array(engine.score(list(range(20))))


def as_mlx_lm(arrays):
    """The names and stacks that mlx-lm writes."""
    made = {}
    for name, array in arrays.items():
        name = re.sub(r"^model\.(?!vision|embed_vision)(?:language_model\.)?", "language_model.model.", name)
        if name.endswith("experts.gate_up_proj"):
            gate, up = mx.split(array, 2, axis=1)
            made[name.replace("gate_up_proj", "switch_glu.gate_proj.weight")] = gate
            made[name.replace("gate_up_proj", "switch_glu.up_proj.weight")] = up
        elif name.endswith("experts.down_proj"):
            made[name.replace("down_proj", "switch_glu.down_proj.weight")] = array
        else:
            made[name] = array
    return made


def test_mlx_lm_names(tmp_path):
    folder = copied("gemma4_moe", tmp_path, as_mlx_lm)
    assert np.array_equal(scored(folder), scored(HERE / "gemma4_moe"))


def test_unused_keys_and_values_are_dropped(tmp_path):
    def with_unused(arrays):
        for i in (3, 4):
            for name in ("k_proj.weight", "v_proj.weight", "k_norm.weight", "k_proj.scales"):
                arrays[f"model.layers.{i}.self_attn.{name}"] = mx.ones((3, 7))
        return arrays

    folder = copied("gemma4_e2b", tmp_path, with_unused)
    assert np.array_equal(scored(folder), scored(HERE / "gemma4_e2b"))


def test_matrices_need_not_be_joined(arch, ref):
    """As they stay where q, k and v are packed differently."""
    model = build(FolderCheckpoint(HERE / arch), dtype=mx.float32)
    with Engine(model, mlxrt.EngineConfig(kv_memory="64M")) as engine:
        found = np.array(engine.score(ref["len33.tokens"].tolist()))
    assert np.abs(found - ref["len33.logits"]).max() < tolerance(arch)


@pytest.mark.skipif(not SHARED.exists(), reason="the parity fixtures are not here: rows of full groups")
@pytest.mark.parametrize("arch", ["gemma3_mm", "gemma4_e2b", "gemma4_mm", "gemma4_moe"])
def test_packed(arch, tmp_path):
    """Matrices in 4 bit, some in 8, named as mlx-lm names them: packed and unpacked agree, and nothing is said."""
    arrays, raw = dict(mx.load(str(SHARED / arch / TENSORS))), json.loads((SHARED / arch / "config.json").read_text())
    made, eight = {}, {"group_size": 32, "bits": 8}
    raw["quantization"] = {"group_size": 32, "bits": 4}
    for name, array in as_mlx_lm(arrays).items():
        if "vision" in name or array.ndim < 2 or array.shape[-1] % 32:
            made[name] = array
            continue
        path = name.removesuffix(".weight")
        wide = path.endswith(("mlp.gate_proj", "q_proj", "router.proj"))
        packed = mx.quantize(array, 32, 8 if wide else 4)
        made |= {f"{path}.{part}": a for part, a in zip(("weight", "scales", "biases"), packed, strict=True)}
        if wide:
            raw["quantization"][path] = eight
    (tmp_path / "config.json").write_text(json.dumps(raw))
    mx.save_safetensors(str(tmp_path / TENSORS), made)
    said = capture_log()
    plain, packed = (build(FolderCheckpoint(tmp_path), dtype=mx.float32, dequantise=whole) for whole in (True, False))
    assert packed.model.layers[0].mlp.gate_proj.bits == 8
    assert packed.model.layers[-1].mlp.down_proj.weight.dtype == mx.uint32
    assert said == []
    packed.fuse()
    logits = []
    for model in (plain, packed):
        with Engine(model, mlxrt.EngineConfig(kv_memory="64M")) as engine:
            logits.append(np.array(engine.score(list(range(20)))))
    assert np.abs(logits[0] - logits[1]).max() < 1e-3


def test_used_keys_are_needed(tmp_path):
    def without(arrays):
        del arrays["model.layers.2.self_attn.k_norm.weight"]
        return arrays

    with pytest.raises(BadCheckpoint, match=r"layers\.2\.self_attn\.k_norm"):
        scored(copied("gemma4_e2b", tmp_path, without))


def test_norms_are_rounded_once(tmp_path):
    """1 + w of a bfloat16 w needs more digits than bfloat16 has; computing in float32 must see them."""
    folder = copied("gemma2", tmp_path, lambda arrays: {n: a.astype(mx.bfloat16) for n, a in arrays.items()})
    stored = mx.load(str(folder / TENSORS))["model.norm.weight"].astype(mx.float32)
    with mlxrt.load(str(folder), mlxrt.EngineConfig(dtype="float32", kv_memory="64M")) as engine:
        assert mx.array_equal(engine.model.model.norm.weight, 1 + stored)


def test_memory_of_each_layer():
    raw = config_of("gemma4_e2b")
    specs = find(raw)(parse(raw)).cache_specs()
    assert [type(s) for s in specs] == [PagedKV, WindowKV, WindowKV, Shared, Shared]
    assert [s.dim for s in specs[:3]] == [16, 8, 8]
    assert specs[3:] == [Shared(2), Shared(0)]


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("language_model.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
    ],
)
def test_names_inside_a_wrapper(name, ours):
    assert rename_text_tensor(name) == ours
