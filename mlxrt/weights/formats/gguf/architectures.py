"""The GGUF architectures mlxrt supports: tensor names, what llama.cpp's converter changes, and their own keys.

What files leave out and llama.cpp has in its source (a window pattern, a scale) is in this table.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ....errors import UnsupportedModel
from ....kernels.ops.quantized import K_QUANTS
from .metadata import ArchMetadata
from .reader import GGUFTensor

Tensors = Mapping[str, GGUFTensor]
Config = dict[str, Any]

GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
EXPERTS = {
    "ffn_gate_inp": "mlp.gate", "ffn_gate_exps": "mlp.experts.gate_proj", "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}  # fmt: skip
POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
GPT_OSS_NAMES = {
    "ffn_gate_inp": "mlp.router", "post_attention_norm": "post_attention_layernorm", "attn_sinks": "self_attn.sinks",
}  # fmt: skip
PARTS = "|".join(("weight", "bias", "scales", "biases", *K_QUANTS))
NO_SUFFIX = {"self_attn.sinks"}  # a parameter, not a module


@dataclass(frozen=True)
class Architecture:
    """One GGUF architecture."""

    model_type: str
    hub_class: str
    names: Mapping[str, str] = field(default_factory=lambda: LAYER_NAMES)
    extra_keys: frozenset[str] = frozenset()  # its own keys
    config: Callable[[ArchMetadata, Tensors], Config] = lambda keys, tensors: {}  # from its own keys
    permutes_qk: bool = False  # the converter reorders the rows of q and k
    norm_plus_one: bool = False  # the converter adds the 1 that the model adds to its norm weights
    full_every: int | None = None  # full attention in every n-th layer by default; 0: never; None: unknown
    needs_window: bool = False  # a window is required
    yarn_extras: Mapping[str, Any] | None = None  # more YaRN settings; with it, YaRN is the default
    rope_theta: float | None = 10000.0  # where the file has none; None: it must have one
    local_rope_theta: float | None = None  # of sliding-window layers, if not given; None: one for all layers

    def rename(self, name: str) -> str:
        """The Hugging Face name; an unknown one stays, and building the model reports it."""
        found = re.fullmatch(rf"(?:blk\.(\d+)\.)?(\w+)\.({PARTS})", name)
        if not found:
            return name
        layer, stem, suffix = found.groups()
        if layer is None:
            return f"{GLOBAL_NAMES[stem]}.{suffix}" if stem in GLOBAL_NAMES else name
        if stem not in self.names:
            return name
        ours = f"model.layers.{layer}.{self.names[stem]}"
        return ours if self.names[stem] in NO_SUFFIX and suffix == "weight" else f"{ours}.{suffix}"


def expert_config(keys: ArchMetadata) -> Config:
    return {"num_experts": keys.integer("expert_count"), "num_experts_per_tok": keys.integer("expert_used_count")}


def llama(keys: ArchMetadata, tensors: Tensors) -> Config:
    """Llama, Mistral and Mixtral are one architecture in GGUF."""
    if keys.integer("expert_count", 0, low=0):
        inner = keys.integer("expert_feed_forward_length", keys.integer("feed_forward_length"))
        mixtral = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "intermediate_size": inner}
        return expert_config(keys) | mixtral
    dense = {"mlp_bias": "blk.0.ffn_gate.bias" in tensors}
    if keys.integer("attention.sliding_window", 0, low=0):
        return dense | {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    return dense


def qwen3_moe(keys: ArchMetadata, tensors: Tensors) -> Config:
    dense = (re.fullmatch(r"blk\.(\d{1,6})\.ffn_gate\.weight", name) for name in tensors)
    return expert_config(keys) | {
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "norm_topk_prob": keys.boolean("expert_weights_norm", True),  # llama.cpp normalises and writes no key
        "mlp_only_layers": sorted(int(found[1]) for found in dense if found),
    }


def gpt_oss(keys: ArchMetadata, tensors: Tensors) -> Config:
    """The alpha of the gate has no key: every published file has 1.702."""
    return expert_config(keys) | {
        "intermediate_size": keys.integer("expert_feed_forward_length"),
        "swiglu_limit": keys.number("swiglu_clamp_exp", 7.0),
    }


def gemma_config(keys: ArchMetadata, layers_27b: int) -> Config:
    """Common to Gemma 2 and 3. The 27B, known by its layers, has another attention scale."""
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    scalar: float = keys.integer("attention.key_length", hidden // heads or None)
    if keys.integer("block_count") == layers_27b:
        scalar = hidden // heads
    if keys.find("attention.scale") is not None:
        scalar = keys.number("attention.scale") ** -2
    return {"hidden_act": "gelu_pytorch_tanh", "query_pre_attn_scalar": scalar}


def read_softcap(keys: ArchMetadata, key: str) -> float | None:
    """A logit soft cap; 0 is none."""
    return None if keys.find(key) == 0 else keys.number(key)


def gemma2(keys: ArchMetadata, tensors: Tensors) -> Config:
    """The soft caps are required: files converted before they existed compute something else."""
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    return gemma_config(keys, layers_27b=46) | {key: read_softcap(keys, key) for key in caps}


def gemma3(keys: ArchMetadata, tensors: Tensors) -> Config:
    capped = keys.find("final_logit_softcapping") is not None
    local = keys.number("rope.freq_base_swa", ARCHITECTURES["gemma3"].local_rope_theta)
    softcap = {"final_logit_softcapping": read_softcap(keys, "final_logit_softcapping") if capped else None}
    return gemma_config(keys, layers_27b=62) | softcap | {"rope_local_base_freq": local}


ARCHITECTURES = {
    "llama": Architecture(
        "llama", "LlamaForCausalLM", LAYER_NAMES | EXPERTS, config=llama, permutes_qk=True, full_every=0,
    ),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": Architecture(
        "qwen3_moe", "Qwen3MoeForCausalLM", LAYER_NAMES | EXPERTS, config=qwen3_moe, rope_theta=None,
        extra_keys=frozenset({"expert_weights_norm"}),
    ),
    "gpt-oss": Architecture(
        "gpt_oss", "GptOssForCausalLM", LAYER_NAMES | EXPERTS | GPT_OSS_NAMES, config=gpt_oss, full_every=2,
        needs_window=True, extra_keys=frozenset({"swiglu_clamp_exp"}), yarn_extras={"truncate": False}, rope_theta=None,
    ),
    "gemma2": Architecture(
        "gemma2", "Gemma2ForCausalLM", LAYER_NAMES | POST_NORMS, config=gemma2, full_every=2, needs_window=True,
        norm_plus_one=True,
        extra_keys=frozenset({"attention.scale", "attn_logit_softcapping", "final_logit_softcapping"}),
    ),
    "gemma3": Architecture(
        "gemma3_text", "Gemma3ForCausalLM", LAYER_NAMES | POST_NORMS, config=gemma3, full_every=6, norm_plus_one=True,
        extra_keys=frozenset({"attention.scale", "final_logit_softcapping"}), rope_theta=None, local_rope_theta=10000.0,
    ),
}  # fmt: skip


def read_windows(keys: ArchMetadata, arch: Architecture, layers: int) -> Config:
    """Which layers have a sliding window, from the file or the architecture."""
    size, key = keys.integer("attention.sliding_window", 0, low=0), "attention.sliding_window_pattern"
    if not size and (arch.needs_window or keys.find(key) not in (None, 1)):
        raise keys.wrong("attention.sliding_window", "an integer >= 1")
    if not size:
        return {"layer_types": ["full_attention"] * layers} if arch.full_every else {}
    if isinstance(keys.find(key), list):
        slides = keys.booleans(key, layers)
    elif keys.find(key) is not None or arch.full_every is not None:
        every = keys.integer(key, arch.full_every, low=0)
        slides = [every == 0 or (i + 1) % every != 0 for i in range(layers)]
    else:
        raise UnsupportedModel(
            f"{keys.architecture}.attention.sliding_window = {size}: the GGUF does not say for which layers "
            f"(no key {keys.architecture}.{key})"
        )
    return {"sliding_window": size, "layer_types": ["sliding_attention" if s else "full_attention" for s in slides]}
