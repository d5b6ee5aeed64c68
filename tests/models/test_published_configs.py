"""Configs as they are published load with the right context, or are refused by name.

Those of `shape:` names, and more here: sizes and the keys that decide the context, without what has no effect.
"""

import logging

import pytest

from mlxrt.errors import BadCheckpoint, MlxrtError, UnsupportedModel
from mlxrt.models import find
from mlxrt.weights.random_models import published_configs

SHAPES = {
    "smollm2-135m": 8192, "llama-3.1-8b": 131072, "qwen3-0.6b": 40960, "qwen3-8b": 40960, "qwen3-30b-a3b": 40960,
    "qwen3.5-9b": 262144, "qwen3.5-35b-a3b": 262144, "gemma3-1b": 32768, "gemma4-e2b": 131072, "gemma4-26b-a4b": 131072,
    "gemma4-31b": 131072, "minimax-m2": 196608, "gpt-oss-20b": 131072, "gpt-oss-120b": 131072, "mixtral-8x7b": 32768,
}  # fmt: skip


def scaled(kind, factor, original=None, **more):
    given = {"type": kind, "factor": factor, "original_max_position_embeddings": original, **more}
    return {"rope_scaling": {k: v for k, v in given.items() if v is not None or k in more}}


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
NO_WINDOW = {"use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28}
EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1536, "norm_topk_prob": True}
EXPERTS |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
GEMMA2 = {
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "hidden_activation": "gelu_pytorch_tanh",
}
GEMMA2 |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "hidden_act": "gelu_pytorch_tanh"}
GEMMA3 = {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 1024, "sliding_window_pattern": 6}
GEMMA3 |= {"rope_local_base_freq": 10000.0, "hidden_act": "gelu_pytorch_tanh"}

# type; hidden, MLP, layers, heads, KV heads (None: no key), vocabulary; max_position_embeddings, theta (None: no key);
# other keys; the context
PUBLISHED = {
    "Llama-2-7b": ("llama", (4096, 11008, 32, 32, 32, 32000), 4096, None, {"pretraining_tp": 1}, 4096),
    "Llama-2-13b": ("llama", (5120, 13824, 40, 40, 40, 32000), 4096, None, {}, 4096),
    "Llama-2-70b": ("llama", (8192, 28672, 80, 64, 8, 32000), 4096, None, {"rope_scaling": None}, 4096),
    "vicuna-7b-v1.5": ("llama", (4096, 11008, 32, 32, 32, 32000), 4096, None, {"max_sequence_length": 4096}, 4096),
    "vicuna-7b-v1.5-16k": (
        "llama", (4096, 11008, 32, 32, 32, 32000), 4096, None, {"max_sequence_length": 16384} | scaled("linear", 4.0),
        16384,
    ),
    "open_llama_3b": ("llama", (3200, 8640, 26, 32, None, 32000), 2048, None, {}, 2048),
    "open_llama_7b": ("llama", (4096, 11008, 32, 32, None, 32000), 2048, None, {}, 2048),
    "TinyLlama-1.1B, early": ("llama", (2048, 5632, 22, 32, 4, 32000), 2048, None, {}, 2048),
    "CodeLlama-7b": ("llama", (4096, 11008, 32, 32, 32, 32016), 16384, 1e6, {}, 16384),
    "Meta-Llama-3-8B": ("llama", (4096, 14336, 32, 32, 8, 128256), 8192, 5e5, {}, 8192),
    "Llama-3.2-1B": (
        "llama", (2048, 8192, 16, 32, 8, 128256), 131072, 5e5,
        {"head_dim": 64} | scaled("llama3", 32.0, 8192, **LLAMA3), 131072,
    ),
    "SmolLM2-1.7B": ("llama", (2048, 8192, 24, 32, 32, 49152), 8192, 130000, {}, 8192),
    "Yi-6B": ("llama", (4096, 11008, 32, 32, 4, 64000), 4096, 5e6, {}, 4096),
    "deepseek-coder-6.7b": ("llama", (4096, 11008, 32, 32, 32, 32256), 16384, 1e5, scaled("linear", 4.0), 16384),
    "Yarn-Llama-2-7b-128k": (
        "llama", (4096, 11008, 32, 32, 32, 32000), 131072, None, scaled("yarn", 32.0, 4096, finetuned=True), 131072,
    ),
    "Mistral-7B-v0.1": ("mistral", (4096, 14336, 32, 32, 8, 32000), 32768, 1e4, {"sliding_window": 4096}, 32768),
    "Mistral-7B-v0.3": ("mistral", (4096, 14336, 32, 32, 8, 32768), 32768, 1e6, {"sliding_window": None}, 32768),
    "Mistral-Nemo": ("mistral", (5120, 14336, 40, 32, 8, 131072), 131072, 1e6, {"head_dim": 128}, 131072),
    "Mistral-Small-24B": ("mistral", (5120, 32768, 40, 32, 8, 131072), 32768, 1e8, {"head_dim": 128}, 32768),
    "Mixtral-8x22B": (
        "mixtral", (6144, 16384, 56, 48, 8, 32768), 65536, 1e6, {"num_local_experts": 8, "num_experts_per_tok": 2},
        65536,
    ),
    "Qwen2.5-0.5B": ("qwen2", (896, 4864, 24, 14, 2, 151936), 32768, 1e6, NO_WINDOW, 32768),
    "Qwen2.5-7B": ("qwen2", (3584, 18944, 28, 28, 4, 152064), 32768, 1e6, NO_WINDOW, 32768),
    "Qwen2.5-7B, YaRN": (
        "qwen2", (3584, 18944, 28, 28, 4, 152064), 32768, 1e6, NO_WINDOW | scaled("yarn", 4.0, 32768), 131072,
    ),
    "Qwen2.5-7B-1M": ("qwen2", (3584, 18944, 28, 28, 4, 152064), 1010000, 1e7, NO_WINDOW, 1010000),
    "QwQ-32B": ("qwen2", (5120, 27648, 64, 40, 8, 152064), 40960, 1e6, NO_WINDOW, 40960),
    "Qwen3-8B, YaRN": (
        "qwen3", (4096, 12288, 36, 32, 8, 151936), 40960, 1e6, {"head_dim": 128} | scaled("yarn", 4.0, 32768), 131072,
    ),
    "Qwen3-8B, YaRN with nulls": (
        "qwen3", (4096, 12288, 36, 32, 8, 151936), 40960, 1e6,
        {"head_dim": 128} | scaled("yarn", 2.0, 32768, beta_fast=None, beta_slow=None), 65536,
    ),
    "Qwen3-32B": ("qwen3", (5120, 25600, 64, 64, 8, 151936), 40960, 1e6, {"head_dim": 128}, 40960),
    "Qwen3-235B-A22B": (
        "qwen3_moe", (4096, 12288, 94, 64, 4, 151936), 40960, 1e6, {"head_dim": 128} | EXPERTS, 40960,
    ),
    "gemma-2-2b": ("gemma2", (2304, 9216, 26, 8, 4, 256000), 8192, 1e4, GEMMA2, 8192),
    "gemma-2-9b": ("gemma2", (3584, 14336, 42, 16, 8, 256000), 8192, 1e4, GEMMA2, 8192),
    "gemma-3-4b, text": (
        "gemma3_text", (2560, 10240, 34, 8, 4, 262208), 131072, 1e6, GEMMA3 | scaled("linear", 8.0), 131072,
    ),
}  # fmt: skip
REFUSED = {
    "LongRoPE": ("llama", (3072, 8192, 32, 32, 32, 32064), 131072, 1e4, scaled("longrope", 32.0), "longrope"),
    "bert-base": ("bert", (768, 3072, 12, 12, 12, 30522), 512, None, {}, "bert"),
    "t5-small": ("t5", (512, 2048, 6, 8, 8, 32128), 512, None, {}, "t5"),
    "whisper-tiny": ("whisper", (384, 1536, 4, 6, 6, 51865), 448, None, {}, "whisper"),
    "Qwen2 without theta": ("qwen2", (896, 4864, 24, 14, 2, 151936), 32768, None, {}, "rope_theta"),
    "Mistral without theta": ("mistral", (4096, 14336, 32, 32, 8, 32000), 32768, None, {}, "rope_theta"),
}  # fmt: skip


def write_config(kind, sizes, limit, theta, more):
    hidden, mlp, layers, heads, kv, vocab = sizes
    raw = {"model_type": kind, "hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers}
    raw |= {"num_attention_heads": heads, "vocab_size": vocab, "max_position_embeddings": limit}
    raw |= {"rms_norm_eps": 1e-6, "hidden_act": "silu", "use_cache": True, "torch_dtype": "bfloat16"}
    raw |= {} if kv is None else {"num_key_value_heads": kv}
    return raw | ({} if theta is None else {"rope_theta": theta}) | more


def parse(raw):
    return find(raw).parse(raw)


def test_there_are_forty():
    assert len(SHAPES) + len(PUBLISHED) + len(REFUSED) >= 40
    assert SHAPES.keys() == published_configs().keys()


@pytest.mark.parametrize("name", SHAPES)
def test_context_of_shapes(name):
    assert parse(dict(published_configs()[name])).context == SHAPES[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_context_of_published_configs(name):
    *given, context = PUBLISHED[name]
    config = parse(write_config(*given))
    assert config.context == context
    assert config.rope.theta == (given[3] or 10_000.0)


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_reason(name):
    *given, word = REFUSED[name]
    with pytest.raises(MlxrtError, match=word) as caught:
        parse(write_config(*given))
    assert isinstance(caught.value, (BadCheckpoint, UnsupportedModel))


def test_slices_of_pretraining_change_nothing():
    """`pretraining_tp`: products were computed in so many slices, whose sum is the same."""
    *given, _ = PUBLISHED["Llama-2-13b"]
    assert parse(write_config(*given) | {"pretraining_tp": 2}) == parse(write_config(*given))


def test_keys_of_a_scaling_that_are_not_read_are_named(caplog):
    *given, _ = PUBLISHED["Yarn-Llama-2-7b-128k"]
    with caplog.at_level(logging.WARNING, "mlxrt"):
        parse(write_config(*given))
    assert [line for line in caplog.messages if "rope" in line] == [
        "config.json: rope_scaling.finetuned is unknown to mlxrt and has no effect"
    ]


@pytest.mark.parametrize("name", [*SHAPES])
def test_shapes_have_no_unknown_keys(name, caplog):
    with caplog.at_level(logging.WARNING, "mlxrt"):
        parse(dict(published_configs()[name]))
    assert not caplog.messages


def test_factors_of_a_gguf_keep_the_linear_scaling():
    *given, _ = PUBLISHED["deepseek-coder-6.7b"]
    raw = write_config(*given) | {"rope_freq_factors": [2.0] * 64}
    rope = parse(raw).rope
    assert rope.scale == 0.25
    assert rope.periods is not None and rope.periods[0] == 2.0
    *given, _ = PUBLISHED["Yarn-Llama-2-7b-128k"]
    with pytest.raises(UnsupportedModel, match="yarn"):
        parse(write_config(*given) | {"rope_freq_factors": [2.0] * 64})


def test_a_null_share_of_gemma4_is_the_whole_head():
    raw = dict(published_configs()["gemma4-e2b"])
    full = raw["rope_parameters"]["full_attention"]
    parts = {"full_attention": full | {"partial_rotary_factor": None}}
    assert parse(raw | {"rope_parameters": raw["rope_parameters"] | parts}).context == 131072
