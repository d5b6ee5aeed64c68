"""Published shapes against transformers' config classes and mlx-lm's models; random weights against their promises."""

import math

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxrt.errors import BadRequest, ModelNotFound
from mlxrt.weights.random_models import Shape, published_configs, random_weights, shape_config

# Parameters as the makers publish them, in millions.
PUBLISHED = {
    "smollm2-135m": 134.5,
    "llama-3.1-8b": 8030,
    "qwen3-0.6b": 596,
    "qwen3-8b": 8191,
    "qwen3-30b-a3b": 30_532,
    "gemma3-1b": 1000,
    "gpt-oss-20b": 20_915,
    "gpt-oss-120b": 116_829,
    "mixtral-8x7b": 46_703,
}


def peer(config: dict) -> nn.Module:
    """mlx-lm's model of this config, built and not evaluated."""
    from mlx_lm.utils import _get_classes

    model, arguments = _get_classes(config)
    return model(arguments.from_dict(config))


@pytest.mark.parametrize("name", published_configs())
def test_mlx_lm_builds_it_with_the_published_number_of_parameters(name):
    """Nothing is evaluated: building 229 billion parameters costs no memory."""
    config = shape_config(name)
    mx.reset_peak_memory()
    sizes = {key: value.size for key, value in tree_flatten(peer(config).parameters())}
    assert mx.get_peak_memory() < 100e6
    total = sum(sizes.values())
    if name == "gemma3-1b":
        total -= sizes["lm_head.weight"]  # tied, yet mlx-lm makes a place for it
    if name in PUBLISHED:
        assert total / 1e6 == pytest.approx(PUBLISHED[name], rel=1e-3)
    else:
        billions = {"qwen3.5-9b": 9, "qwen3.5-35b-a3b": 35, "gemma4-e2b": 4.6, "gemma4-26b-a4b": 25.2}
        billions |= {"gemma4-31b": 30.7, "minimax-m2": 229}
        assert total / 1e9 == pytest.approx(billions[name], rel=0.02)


@pytest.mark.parametrize("name", published_configs())
def test_transformers_reads_the_same_numbers(name):
    transformers = pytest.importorskip("transformers")
    config = shape_config(name)
    read = transformers.AutoConfig.for_model(**config)
    text = config.get("text_config", config)
    known = read.get_text_config().to_dict()
    keys = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    assert {key: known[key] for key in keys} == {key: text[key] for key in keys}
    assert (known["rms_norm_eps"], known["tie_word_embeddings"]) == (text["rms_norm_eps"], text["tie_word_embeddings"])
    for key in ("layer_types", "sliding_window", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"):
        if text.get(key) is not None:
            assert known[key] == text[key], key
    rope = known["rope_parameters"]
    if "rope_theta" in rope:
        theta = text["rope_parameters"]["rope_theta"] if "rope_parameters" in text else text["rope_theta"]
        assert rope["rope_theta"] == theta
    else:
        local = text.get("rope_local_base_freq") or text["rope_parameters"]["sliding_attention"]["rope_theta"]
        assert rope["sliding_attention"]["rope_theta"] == local == 1e4
        assert rope["full_attention"]["rope_theta"] == 1e6


def test_a_config_is_a_copy():
    shape_config("gemma4-31b")["rope_parameters"]["full_attention"].clear()
    assert shape_config("gemma4-31b")["rope_parameters"]["full_attention"]["rope_theta"] == 1e6


def test_how_a_shape_is_spelled():
    assert Shape.parse("shape:qwen3-8b") == Shape("qwen3-8b", None)
    assert [Shape.parse(f"shape:qwen3-8b@{b}bit").bits for b in (2, 3, 4, 5, 6, 8)] == [2, 3, 4, 5, 6, 8]
    assert Shape.parse("shape:gpt-oss-20b@mxfp4") == Shape("gpt-oss-20b", 4, "mxfp4", 32)
    with pytest.raises(ModelNotFound, match=r"qwen3-0\.6b"):
        Shape.parse("shape:qwen9")
    for suffix in ("7bit", "4", "", "16bit", "4bits", "nvfp4", "mxfp4bit", "4bit@4bit"):
        with pytest.raises(BadRequest, match="@4bit"):
            Shape.parse(f"shape:qwen3-8b@{suffix}")


TINY = {"num_hidden_layers": 2, "vocab_size": 512}
FORMATS = [(None, "affine", 64), *((bits, "affine", 64) for bits in (2, 3, 4, 5, 6, 8)), (4, "mxfp4", 32)]


@pytest.mark.parametrize(("bits", "mode", "group"), FORMATS)
def test_random_weights_run_and_have_the_promised_form(bits, mode, group):
    model = peer(shape_config("smollm2-135m") | TINY)
    floats = dict(tree_flatten(model.parameters()))
    random_weights(model, bits, mode=mode, group_size=group, dtype=mx.float32, seed=3)
    logits = model(mx.array([[1, 2, 3, 4]]))
    assert logits.dtype == mx.float32 and np.isfinite(np.array(logits)).all()
    assert 0.05 < np.array(logits).std() < 20
    matrices = [m for _, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Embedding))]
    packed = [m for _, m in model.named_modules() if isinstance(m, (nn.QuantizedLinear, nn.QuantizedEmbedding))]
    assert (len(matrices), len(packed)) == ((15, 0) if bits is None else (0, 15))
    for module in matrices + packed:
        weight = np.array(dense(module))
        assert weight.mean() == pytest.approx(0, abs=3e-4)
        assert weight.std() == pytest.approx(0.02, rel=0.2)
    for module in packed:
        assert (module.weight.dtype, module.bits, module.mode, module.group_size) == (mx.uint32, bits, mode, group)
        assert module.scales.dtype == (mx.uint8 if mode == "mxfp4" else mx.float32)
    assert nbytes(model) == expected_bytes(floats, bits, mode, group)


def dense(module: nn.Module) -> mx.array:
    if "scales" not in module:
        return module.weight
    return mx.dequantize(
        module.weight,
        module.scales,
        module.get("biases"),
        module.group_size,
        module.bits,
        module.mode,
        dtype=mx.float32,
    )


def nbytes(model: nn.Module) -> int:
    return sum(value.nbytes for _, value in tree_flatten(model.parameters()))


def expected_bytes(floats: dict[str, mx.array], bits: int | None, mode: str, group: int) -> int:
    total = 0
    for value in floats.values():
        if bits is None or value.ndim == 1:
            total += value.size * 4
        else:
            total += value.size * bits // 8 + value.size // group * (1 if mode == "mxfp4" else 8)
    return total


@pytest.mark.parametrize("bits", [None, 4])
def test_the_seed_decides(bits):
    def made(seed: int) -> dict[str, np.ndarray]:
        model = peer(shape_config("smollm2-135m") | TINY)
        random_weights(model, bits, dtype=mx.float32, seed=seed)
        return {name: np.array(value) for name, value in tree_flatten(model.parameters())}

    one, same, other = made(1), made(1), made(2)
    assert all((one[name] == same[name]).all() for name in one)
    differing = [name for name in one if (one[name] != other[name]).any()]
    assert len(differing) == sum(one[name].ndim > 1 for name in one)
    first, second = (one[f"model.layers.{i}.self_attn.q_proj.weight"] for i in (0, 1))
    assert (first != second).mean() > 0.9, "layers must not repeat each other"


def test_the_packed_bits_are_even():
    model = peer(shape_config("smollm2-135m") | TINY)
    random_weights(model, 4, dtype=mx.float32)
    words = np.array(model["model"]["embed_tokens"].weight).reshape(-1)
    nibbles = np.bincount(((words[:, None] >> np.arange(0, 32, 4)) & 15).reshape(-1), minlength=16) / (words.size * 8)
    assert nibbles == pytest.approx(1 / 16, rel=0.03)
    neighbours = np.corrcoef(words[:-1].astype(float), words[1:].astype(float))[0, 1]
    assert abs(neighbours) < 5 / math.sqrt(words.size)


def test_bfloat16_by_default():
    model = peer(shape_config("smollm2-135m") | TINY)
    random_weights(model, 4)
    kinds = {name.rpartition(".")[2]: value.dtype for name, value in tree_flatten(model.parameters())}
    assert kinds == {"weight": mx.uint32, "scales": mx.bfloat16, "biases": mx.bfloat16} | kinds
    norms = [value for name, value in tree_flatten(model.parameters()) if name.endswith("norm.weight")]
    assert norms and all(value.dtype == mx.bfloat16 and (value == 1).all() for value in norms)


def test_stacks_of_experts_are_packed_too():
    small = {"num_hidden_layers": 1, "vocab_size": 256, "hidden_size": 128, "intermediate_size": 64}
    small |= {"num_local_experts": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    model = peer(shape_config("mixtral-8x7b") | small)
    random_weights(model, 4, dtype=mx.float32)
    stacks = [value for _, value in tree_flatten(model.parameters()) if value.ndim == 3 and value.dtype == mx.uint32]
    assert sorted(value.shape for value in stacks) == [(4, 64, 16), (4, 64, 16), (4, 128, 8)]
    assert np.isfinite(np.array(model(mx.array([[1, 2, 3]])))).all()


def test_rows_not_a_multiple_of_the_group_stay_unquantized():
    model = nn.Sequential(nn.Linear(96, 8), nn.Linear(8, 64))
    random_weights(model, 4, dtype=mx.float32)
    assert [layer.weight.dtype for layer in model.layers] == [mx.float32, mx.float32]


def test_an_unknown_way_to_store():
    with pytest.raises(BadRequest, match="mxfp4"):
        random_weights(nn.Linear(64, 64), 8, mode="mxfp8")


def test_what_scales_a_layer_is_one():
    """A factor near zero would make two right engines give different tokens."""
    model = nn.Module()
    model.layer_scalar, model.other = mx.zeros((1,)), mx.zeros((2,))
    random_weights(model, dtype=mx.float32)
    assert model.layer_scalar.item() == 1.0 and 0 < mx.abs(model.other).max().item() < 0.1
