"""Published shapes made small, with kernels in the path: the tokens of plain MLX, and how few launches they take."""

import mlx.core as mx
import pytest

from mlxrt import EngineConfig, Request, SamplingParams
from mlxrt.engine.engine import Engine, Source
from mlxrt.kernels import Kernels, make_gpu
from mlxrt.models import find
from mlxrt.weights.random_models import published_configs, random_weights, shape_config

from ..support.metal_sim import Simulator

LAYERS, GEMMA_LAYERS = 2, 4  # two kinds of attention; Gemma's last two read the keys of the first two
SMALL = {
    "num_hidden_layers": LAYERS,
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "global_head_dim": 128,
    "vocab_size": 192,
    "vocab_size_per_layer_input": 192,
    "hidden_size_per_layer_input": 64,
    "num_kv_shared_layers": 2,
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "layer_types": ["sliding_attention", "full_attention"],
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# One of each family, but for sizes of those that are there.
SHAPES = sorted(set(published_configs()) - {"smollm2-135m", "llama-3.1-8b", "qwen3-8b", "gpt-oss-120b"})
PROMPT = tuple(7 * i % 191 for i in range(21))
# Launches of a step at batch 1: of its layers, and for the embedding, the head and the choice.
DENSE, SPARSE = {"qkv_attention", "qmv"}, {"qkv_attention", "qmv", "moe_router_gate_up", "moe_down"}
FAMILIES = [
    ("qwen3-0.6b", DENSE, 4 * LAYERS + 3),
    ("qwen3-30b-a3b", SPARSE, 4 * LAYERS + 3),
    ("gpt-oss-20b", SPARSE, 4 * LAYERS + 3),
    ("qwen3.5-9b", {"qkv_attention", "qmv", "gated_delta_step"}, 5 * LAYERS + 3),
    ("qwen3.5-35b-a3b", SPARSE | {"gated_delta_step"}, 7 * LAYERS + 3),  # 2: the expert that every token uses
    (
        "gemma4-e2b",
        {"qkv_attention", "qmv", "add_norm_qmv", "add_norm"},
        7 * GEMMA_LAYERS + 6,
    ),  # 3: the layers' own inputs
]


def small_sizes(name: str) -> dict[str, object]:
    """What a shape has beside SMALL."""
    if name == "gemma4-e2b":
        return {"num_hidden_layers": GEMMA_LAYERS, "layer_types": SMALL["layer_types"] * 2}
    if name == "gemma4-31b":
        return {"num_global_key_value_heads": 1, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}
    if name == "gemma4-26b-a4b":
        return {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "top_k_experts": 2}
    return {"layer_types": ["linear_attention", "full_attention"]} if name.startswith("qwen3.5") else {}


def made(name, kernels, kv="full", dtype=mx.float32, **sizes):
    raw = shape_config(name)
    sizes |= small_sizes(name)
    inner = raw.get("text_config", raw)
    inner |= {key: value for key, value in (SMALL | sizes).items() if inner.get(key) is not None}
    family = find(raw)
    model = family(family.parse(raw))
    mx.random.seed(3)
    random_weights(model, 4, dtype)
    model.fuse(kernels)
    config = EngineConfig(max_context=256, prefix_cache=False, kv=kv, compile=False, ahead=0)
    return Engine(model, config, source=Source(name))


def answer(engine, n):
    asked = Request(tokens=PROMPT, params=SamplingParams(max_tokens=n, ignore_eos=True))
    return engine.generate(asked).tokens


@pytest.mark.parametrize(("name", "ops", "launches"), FAMILIES)
def test_tokens_are_plain_mlx_s_and_launches_are_few(name, ops, launches):
    with made(name, Kernels("reference")) as plain:
        expected = answer(plain, 9)
    sim = Simulator(strict=False, portable=True)
    kernels = Kernels("strict", make_gpu("metal", sim.metal_kernel))
    with made(name, kernels) as engine:
        counts = []
        for n in (4, 9):
            before = kernels.gpu.launches
            assert answer(engine, n) == expected[:n]
            counts.append(kernels.gpu.launches - before)
    assert not sim.errors() and not kernels.fallbacks
    assert ops <= set(kernels.used) and "paged_attention" not in kernels.used
    assert counts[1] - counts[0] == 5 * launches


def test_lut_projections_are_fused_too():
    with made("qwen3-0.6b", Kernels("reference"), "q8") as plain:
        expected = answer(plain, 6)
    sim = Simulator(strict=False, portable=True)
    kernels = Kernels("strict", make_gpu("metal", sim.metal_kernel))
    with made("qwen3-0.6b", kernels, "q8") as engine:
        assert answer(engine, 6) == expected
    assert not sim.errors() and "qkv_attention" in kernels.used and "quantized_paged_attention" not in kernels.used
