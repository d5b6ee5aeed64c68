"""What Gemma's config files may say, what they leave out, and what is refused."""

import copy
import math

import pytest
from mlx.utils import tree_flatten

from mlxrt.errors import BadCheckpoint, MlxrtError, UnsupportedModel
from mlxrt.models import find
from mlxrt.weights.random_models import shape_config

from ..support.log_lines import capture_log
from .test_gemma import ARCHS, config_of, parse

# Published with most keys left out.
GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}


def changed(arch, **keys):
    """The text part of a config with other values; ... takes a key out."""
    raw = copy.deepcopy(config_of(arch))
    text = raw.get("text_config", raw)
    for key, value in keys.items():
        text.pop(key, None)
        if value is not ...:
            text[key] = value
    return raw


def parameters(raw) -> int:
    """Of the full-size module, of which nothing is computed."""
    flat = tree_flatten(find(raw)(parse(raw)).parameters())
    return sum(math.prod(array.shape) for _, array in flat)


def test_published_totals():
    assert parameters(shape_config("gemma3-1b")) == 999_885_952
    assert parameters(GEMMA3_4B) == 3_880_263_168
    assert parameters(shape_config("gemma4-26b-a4b")) == pytest.approx(25.2e9, rel=0.01)
    assert parameters(shape_config("gemma4-31b")) == pytest.approx(30.7e9, rel=0.01)


def test_left_out_keys():
    said = capture_log()
    c = parse(GEMMA3_4B)
    assert said == []
    assert (c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.vocab_size) == (8, 4, 256, 262208)
    assert [i for i, w in enumerate(c.windows) if w is None] == [5, 11, 17, 23, 29]
    assert (c.ropes[5].theta, c.ropes[5].scale, c.ropes[0].theta, c.ropes[0].scale) == (1e6, 1 / 8, 1e4, 1.0)


def test_some_keys_left_out_is_damage():
    raw = copy.deepcopy(GEMMA3_4B)
    raw["text_config"]["vocab_size"] = 262208
    with pytest.raises(BadCheckpoint, match="num_attention_heads"):
        parse(raw)


def test_last_layer_is_full():
    raw = changed("gemma4_moe", layer_types=["sliding_attention"] * 4)
    said = capture_log()
    assert parse(raw).windows == (5, 5, 5, None)
    assert len(said) == 1
    assert "last" in said[0]


def test_heads_of_full_layers():
    """num_global_key_value_heads counts only where keys serve as values."""
    assert parse(config_of("gemma4_moe")).sizes == ((2, 8), (3, 16), (2, 8), (3, 16))
    assert parse(changed("gemma4_moe", attention_k_eq_v=False)).sizes == ((2, 8), (2, 16), (2, 8), (2, 16))
    layers = {"1": {"head_dim": 12}, "3": {"num_key_value_heads": 1}}
    assert parse(changed("gemma4_moe", per_layer_config=layers)).sizes == ((2, 8), (2, 12), (2, 8), (1, 8))
    assert parse(changed("gemma4_moe", per_layer_config=None)).sizes == ((2, 8),) * 4


ROPE4 = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_theta": 1e4}}
MISSING = [
    ("gemma2", {"rope_theta": ...}, "rope_theta"),
    ("gemma2", {"sliding_window": None}, "sliding_window"),
    ("gemma2", {"attn_logit_softcapping": ...}, "attn_logit_softcapping"),
    ("gemma2", {"query_pre_attn_scalar": ...}, "query_pre_attn_scalar"),
    ("gemma3_text", {"rope_theta": ...}, "rope_theta"),
    ("gemma3_text", {"rope_local_base_freq": ...}, "rope_local_base_freq"),
    ("gemma3_text", {"sliding_window_pattern": ...}, "sliding_window_pattern"),
    ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern"),
    ("gemma3_text", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}, "sliding_attention"),
    ("gemma3_mm", {"rope_theta": ...}, "rope_theta"),
    ("gemma4_e2b", {"rope_parameters": ...}, "rope_theta"),
    ("gemma4_e2b", {"rope_parameters": ROPE4}, "full_attention.rope_theta"),
    ("gemma4_e2b", {"global_head_dim": ...}, "global_head_dim"),
    ("gemma4_e2b", {"head_dim": ...}, "head_dim"),
    ("gemma4_e2b", {"hidden_size_per_layer_input": ...}, "hidden_size_per_layer_input"),
    ("gemma4_e2b", {"num_kv_shared_layers": 5}, "num_kv_shared_layers"),
    ("gemma4_e2b", {"num_kv_shared_layers": 99}, "num_kv_shared_layers"),
    ("gemma4_e2b", {"num_kv_shared_layers": 4}, "num_kv_shared_layers"),
    ("gemma4_e2b", {"vocab_size_per_layer_input": 63}, "vocab_size_per_layer_input"),
    ("gemma4_moe", {"num_experts": None}, "num_experts"),
    ("gemma4_moe", {"top_k_experts": 6}, "top_k_experts"),
    ("gemma4_moe", {"num_global_key_value_heads": 4}, "key-value heads of layer 1"),
    ("gemma4_moe", {"per_layer_config": {"9": {"head_dim": 8}}}, "per_layer_config"),
    ("gemma4_moe", {"per_layer_config": {"1": 8}}, "per_layer_config"),
]
OTHERWISE = [
    ("gemma2", {"hidden_activation": "silu"}, "hidden_activation"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ("gemma3_mm", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ("gemma4_moe", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
    ("gemma4_moe", {"per_layer_config": {"1": {"intermediate_size": 8}}}, "intermediate_size"),
]


@pytest.mark.parametrize(("arch", "keys", "named"), MISSING)
def test_damaged(arch, keys, named):
    with pytest.raises(BadCheckpoint, match=named):
        parse(changed(arch, **keys))


@pytest.mark.parametrize(("arch", "keys", "named"), OTHERWISE)
def test_not_computed(arch, keys, named):
    with pytest.raises(UnsupportedModel, match=named):
        parse(changed(arch, **keys))


@pytest.mark.parametrize("inner", [None, [], "x", 3])
def test_wrapper_without_text(inner):
    for kind in ("gemma3", "gemma4"):
        with pytest.raises(BadCheckpoint, match="text_config"):
            parse({"model_type": kind, "text_config": inner})


ODD = (None, True, -1, 0, 10**400, 1e308, float("nan"), "x", [], [None], {}, {"a": {}}, {"full_attention": 3})


@pytest.mark.parametrize("arch", ARCHS)
def test_any_value_is_read_or_refused(arch):
    """No value of any key ends in anything but a config or one of our errors."""
    keys = set(config_of(arch).get("text_config", config_of(arch))) | {"per_layer_config", "rope_scaling"}
    for key in sorted(keys - {"model_type"}):
        for value in ODD:
            try:
                parse(changed(arch, **{key: value}))
            except MlxrtError as refused:
                assert "\n" not in str(refused)
