"""The architectures mlxrt runs from GGUF: what llama.cpp's converter calls and changes in each, and what it leaves out.

What a file leaves out and llama.cpp takes from its own source (a period of windows, a scale) is in the table here.
Refuses to know bytes and the keys that all architectures share (gguf_config).
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ....errors import UnsupportedModel
from .header import TensorRecord
from .keys import Keys

Tensors = Mapping[str, TensorRecord]
Config = dict[str, Any]

OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
INSIDE = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
EXPERTS = {
    "ffn_gate_inp": "mlp.gate", "ffn_gate_exps": "mlp.experts.gate_proj", "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}  # fmt: skip
SANDWICH = {
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
SINKS = {
    "ffn_gate_inp": "mlp.router", "post_attention_norm": "post_attention_layernorm", "attn_sinks": "self_attn.sinks",
}  # fmt: skip
BARE = {"self_attn.sinks"}  # a vector without a module around it


def nothing(keys: Keys, tensors: Tensors) -> Config:
    return {}


@dataclass(frozen=True)
class Family:
    """One GGUF architecture."""

    model_type: str
    hub_class: str
    names: Mapping[str, str] = field(default_factory=lambda: INSIDE)
    reads: frozenset[str] = frozenset()  # its own keys
    config: Callable[[Keys, Tensors], Config] = nothing  # what they say
    permutes: bool = False  # the converter reorders the rows of q and k
    adds_one: bool = False  # the converter adds the one that the family adds to its norms
    period: int | None = None  # the last layer of so many sees all where a file does not say which; 0: none; None: ask
    needs_window: bool = False  # llama.cpp has no model of it without
    scaled: Mapping[str, Any] | None = None  # what its YaRN has besides; a family with it has YaRN unless told
    base: float | None = 10000.0  # GGUF's theta, where writers leave it out when it is this; None: they never do
    local_base: float | None = None  # theta of layers with a window where not given; None: all layers turn alike

    def rename(self, name: str) -> str:
        """The Hugging Face name; one in no table stays, and building the model lists it as left over."""
        found = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias|scales|biases)", name)
        if not found:
            return name
        layer, stem, suffix = found.groups()
        if layer is None:
            return f"{OUTSIDE[stem]}.{suffix}" if stem in OUTSIDE else name
        if stem not in self.names:
            return name
        ours = f"model.layers.{layer}.{self.names[stem]}"
        return ours if self.names[stem] in BARE and suffix == "weight" else f"{ours}.{suffix}"


def experts(keys: Keys) -> Config:
    return {"num_experts": keys.whole("expert_count"), "num_experts_per_tok": keys.whole("expert_used_count")}


def llama(keys: Keys, tensors: Tensors) -> Config:
    """Llama, Mistral and Mixtral are one architecture here."""
    if keys.whole("expert_count", 0, low=0):
        inner = keys.whole("expert_feed_forward_length", keys.whole("feed_forward_length"))
        mixtral = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "intermediate_size": inner}
        return experts(keys) | mixtral
    dense = {"mlp_bias": "blk.0.ffn_gate.bias" in tensors}
    if keys.whole("attention.sliding_window", 0, low=0):
        return dense | {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    return dense


def qwen3_moe(keys: Keys, tensors: Tensors) -> Config:
    dense = (re.fullmatch(r"blk\.(\d{1,6})\.ffn_gate\.weight", name) for name in tensors)
    return experts(keys) | {
        "moe_intermediate_size": keys.whole("expert_feed_forward_length"),
        "norm_topk_prob": keys.switch("expert_weights_norm", True),  # llama.cpp normalises and writes no key
        "mlp_only_layers": sorted(int(found[1]) for found in dense if found),
    }


def gpt_oss(keys: Keys, tensors: Tensors) -> Config:
    """No key holds the slope of the gate: every published file has 1.702."""
    return experts(keys) | {
        "intermediate_size": keys.whole("expert_feed_forward_length"),
        "swiglu_limit": keys.number("swiglu_clamp_exp", 7.0),
    }


def gemma(keys: Keys, wide: int) -> Config:
    """What Gemma 2 and 3 share. `wide` layers make a 27B, whose scale is not that of its heads."""
    hidden, heads = keys.whole("embedding_length"), keys.whole("attention.head_count")
    scalar: float = keys.whole("attention.key_length", hidden // heads or None)
    if keys.whole("block_count") == wide:
        scalar = hidden // heads
    if keys.find("attention.scale") is not None:
        scalar = keys.number("attention.scale") ** -2
    return {"hidden_act": "gelu_pytorch_tanh", "query_pre_attn_scalar": scalar}


def cap(keys: Keys, key: str) -> float | None:
    """A soft cap; 0 is none."""
    return None if keys.find(key) == 0 else keys.number(key)


def gemma2(keys: Keys, tensors: Tensors) -> Config:
    """The caps must be there: files that were converted before there were any compute something else."""
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    return gemma(keys, wide=46) | {key: cap(keys, key) for key in caps}


def gemma3(keys: Keys, tensors: Tensors) -> Config:
    given = keys.find("final_logit_softcapping") is not None
    local = keys.number("rope.freq_base_swa", FAMILIES["gemma3"].local_base)
    capped = {"final_logit_softcapping": cap(keys, "final_logit_softcapping") if given else None}
    return gemma(keys, wide=62) | capped | {"rope_local_base_freq": local}


FAMILIES = {
    "llama": Family("llama", "LlamaForCausalLM", INSIDE | EXPERTS, config=llama, permutes=True, period=0),
    "qwen2": Family("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": Family(
        "qwen3_moe", "Qwen3MoeForCausalLM", INSIDE | EXPERTS, config=qwen3_moe, base=None,
        reads=frozenset({"expert_weights_norm"}),
    ),
    "gpt-oss": Family(
        "gpt_oss", "GptOssForCausalLM", INSIDE | EXPERTS | SINKS, config=gpt_oss, period=2, needs_window=True,
        reads=frozenset({"swiglu_clamp_exp"}), scaled={"truncate": False}, base=None,
    ),
    "gemma2": Family(
        "gemma2", "Gemma2ForCausalLM", INSIDE | SANDWICH, config=gemma2, period=2, needs_window=True, adds_one=True,
        reads=frozenset({"attention.scale", "attn_logit_softcapping", "final_logit_softcapping"}),
    ),
    "gemma3": Family(
        "gemma3_text", "Gemma3ForCausalLM", INSIDE | SANDWICH, config=gemma3, period=6, adds_one=True,
        reads=frozenset({"attention.scale", "final_logit_softcapping"}), base=None, local_base=10000.0,
    ),
}  # fmt: skip


def windows(keys: Keys, family: Family, layers: int) -> Config:
    """Which layers see a window only, as far as the file or its architecture says."""
    size, key = keys.whole("attention.sliding_window", 0, low=0), "attention.sliding_window_pattern"
    if not size and (family.needs_window or keys.find(key) not in (None, 1)):
        raise keys.wrong("attention.sliding_window", "a whole number >= 1")
    if not size:
        return {"layer_types": ["full_attention"] * layers} if family.period else {}
    if isinstance(keys.find(key), list):
        slides = keys.flags(key, layers)
    elif keys.find(key) is not None or family.period is not None:
        every = keys.whole(key, family.period, low=0)
        slides = [every == 0 or (i + 1) % every != 0 for i in range(layers)]
    else:
        raise UnsupportedModel(
            f"{keys.architecture}.attention.sliding_window = {size}: the GGUF does not say for which layers "
            f"(no key {keys.architecture}.{key})"
        )
    return {"sliding_window": size, "layer_types": ["sliding_attention" if s else "full_attention" for s in slides]}
