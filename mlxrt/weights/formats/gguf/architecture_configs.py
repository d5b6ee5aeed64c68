"""What each GGUF architecture's own keys, and the tensors of a file, say of config.json.

What files leave out and llama.cpp has in its source (a window pattern, a scale) is here too.
"""

import re
from collections.abc import Mapping
from typing import Any

from ....errors import BadCheckpoint, UnsupportedModel
from .metadata import ArchMetadata
from .reader import GGUFTensor

Tensors = Mapping[str, GGUFTensor]
Config = dict[str, Any]

LOCAL_ROPE_THETA = 10000.0  # of Gemma's sliding-window layers
SIGMOID = 2  # expert_gating_func
NO_ROTATION = 1e30  # the converter's factor for a pair that never rotates


def layer_count(keys: ArchMetadata) -> int:
    """Without the layers that predict further tokens, which files append and mlxrt does not use."""
    layers, drafts = keys.integer("block_count"), keys.integer("nextn_predict_layers", 0, low=0)
    if drafts >= layers:
        raise keys.wrong("nextn_predict_layers", f"below block_count = {layers}")
    return layers - drafts


def expert_config(keys: ArchMetadata) -> Config:
    return {"num_experts": keys.integer("expert_count"), "num_experts_per_tok": keys.integer("expert_used_count")}


def read_rows(tensors: Tensors, stem: str, axis: int) -> int | None:
    """A size of the first layer's tensor that has it."""
    pattern = re.compile(rf"blk\.\d{{1,6}}\.{stem}\.weight")
    return next((r.shape[axis] for r in tensors.values() if pattern.fullmatch(r.name) and len(r.shape) > 1), None)


def sparse_config(keys: ArchMetadata, tensors: Tensors, *, normalised: bool = True) -> Config:
    """Experts in all layers but those with a plain MLP. `normalised`: what llama.cpp does, which writes no key."""
    dense = (re.fullmatch(r"blk\.(\d{1,6})\.ffn_gate\.weight", name) for name in tensors)
    return expert_config(keys) | {
        "moe_intermediate_size": keys.integer("expert_feed_forward_length", read_rows(tensors, "ffn_down_exps", -1)),
        "norm_topk_prob": keys.boolean("expert_weights_norm", normalised),
        "mlp_only_layers": sorted(int(found[1]) for found in dense if found),
    }


def shared_expert(keys: ArchMetadata, tensors: Tensors) -> Config:
    width = keys.integer("expert_shared_feed_forward_length", read_rows(tensors, "ffn_gate_shexp", 0))
    return {"shared_expert_intermediate_size": width}


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


def qwen2_moe(keys: ArchMetadata, tensors: Tensors) -> Config:
    return sparse_config(keys, tensors, normalised=False) | shared_expert(keys, tensors)


def minimax_m2(keys: ArchMetadata, tensors: Tensors) -> Config:
    if keys.integer("expert_gating_func", SIGMOID) != SIGMOID:
        raise UnsupportedModel(f"the GGUF key minimax-m2.expert_gating_func must be {SIGMOID}, the sigmoid")
    inner = keys.integer("expert_feed_forward_length")
    return expert_config(keys) | {"intermediate_size": inner, "rotary_dim": read_rotary_dim(keys)}


def phi3(keys: ArchMetadata, tensors: Tensors) -> Config:
    """The long versions have a window that is longer than their context: it never hides anything."""
    dim = keys.integer("attention.key_length", keys.integer("embedding_length") // keys.integer("attention.head_count"))
    config: Config = {"rotary_dim": keys.integer("rope.dimension_count", dim)}
    if keys.integer("attention.sliding_window", 0, low=0) >= keys.integer("context_length"):
        config |= {"sliding_window": None, "layer_types": None}
    return config


def phi3_rope(keys: ArchMetadata, config: Config, short: list[float]) -> None:
    """Factors up to the original context; the scaling's own type is not always written."""
    original = keys.integer("rope.scaling.original_context_length", config["max_position_embeddings"])
    config["rope_scaling"] = {
        "rope_type": "longrope",
        "short_factor": short,
        "original_max_position_embeddings": original,
        "attention_factor": keys.number("rope.scaling.attn_factor", 1.0),
    }


def read_rotary_dim(keys: ArchMetadata) -> int:
    """RoPE turns only the first numbers of a head."""
    return keys.integer("rope.dimension_count", keys.integer("attention.key_length"))


def qwen3_5(keys: ArchMetadata, tensors: Tensors) -> Config:
    """Gated delta nets in the layers that have their tensors."""
    heads, inner = keys.integer("ssm.time_step_rank"), keys.integer("ssm.inner_size")
    if inner % heads:
        raise keys.wrong("ssm.inner_size", f"a multiple of ssm.time_step_rank = {heads}")
    nets = {int(found[1]) for name in tensors if (found := re.match(r"blk\.(\d{1,6})\.ssm_", name))}
    return {
        "layer_types": ["linear_attention" if i in nets else "full_attention" for i in range(layer_count(keys))],
        "linear_conv_kernel_dim": keys.integer("ssm.conv_kernel"),
        "linear_num_key_heads": keys.integer("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": keys.integer("ssm.state_size"),
        "linear_value_head_dim": inner // heads,
        "rotary_dim": read_rotary_dim(keys),
    }


def qwen3_5_moe(keys: ArchMetadata, tensors: Tensors) -> Config:
    return qwen3_5(keys, tensors) | sparse_config(keys, tensors) | shared_expert(keys, tensors)


def gpt_oss(keys: ArchMetadata, tensors: Tensors) -> Config:
    """The alpha of the gate has no key: every published file has 1.702."""
    return expert_config(keys) | {
        "intermediate_size": keys.integer("expert_feed_forward_length"),
        "swiglu_limit": keys.number("swiglu_clamp_exp", 7.0),
    }


def default_attention_scalar(hidden: int, heads: int, head_dim: int, layers: int, layers_27b: int) -> int:
    """What attention is scaled by where a file of Gemma 2 or 3 does not say: the 27B is known by its layers."""
    return hidden // heads if layers == layers_27b else head_dim


def gemma_config(keys: ArchMetadata, layers_27b: int) -> Config:
    """Common to Gemma 2 and 3."""
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    dim = keys.integer("attention.key_length", hidden // heads or None)
    scalar: float = default_attention_scalar(hidden, heads, dim, keys.integer("block_count"), layers_27b)
    if keys.find("attention.scale") is not None:
        scalar = keys.number("attention.scale") ** -2
    return {"hidden_act": "gelu_pytorch_tanh", "query_pre_attn_scalar": scalar}


def read_softcap(keys: ArchMetadata, key: str) -> float | None:
    """A logit soft cap; 0 is none."""
    return None if keys.find(key) == 0 else keys.number(key)


def final_softcap(keys: ArchMetadata) -> Config:
    capped = keys.find("final_logit_softcapping") is not None
    return {"final_logit_softcapping": read_softcap(keys, "final_logit_softcapping") if capped else None}


def gemma2(keys: ArchMetadata, tensors: Tensors) -> Config:
    """The soft caps are required: files converted before they existed compute something else."""
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    return gemma_config(keys, layers_27b=46) | {key: read_softcap(keys, key) for key in caps}


def gemma3(keys: ArchMetadata, tensors: Tensors) -> Config:
    local = keys.number("rope.freq_base_swa", LOCAL_ROPE_THETA)
    return gemma_config(keys, layers_27b=62) | final_softcap(keys) | {"rope_local_base_freq": local}


def gemma4(keys: ArchMetadata, tensors: Tensors) -> Config:
    """Sizes differ between full and sliding layers; E2B's and E4B's last layers read the keys of earlier ones."""
    layers, table = layer_count(keys), tensors.get("per_layer_token_embd.weight")
    slides = gemma4_windows(keys, layers)
    full, local = gemma4_head_dims(keys)
    kv_heads = keys.integers("attention.head_count_kv", layers, keys.integer("attention.head_count"))
    shared = keys.integer("attention.shared_kv_layers", 0, low=0)
    own_values = [f"blk.{i}.attn_v.weight" in tensors for i in range(max(layers - shared, 0)) if not slides[i]]
    inner, double = gemma4_widths(keys, layers, shared)
    local_theta = keys.number("rope.freq_base_swa", LOCAL_ROPE_THETA)
    return final_softcap(keys) | gemma4_experts(keys) | {
        "hidden_act": "gelu_pytorch_tanh",
        "layer_types": ["sliding_attention" if s else "full_attention" for s in slides],
        "head_dim": local,
        "num_key_value_heads": next((n for n, s in zip(kv_heads, slides) if s), kv_heads[0]),
        "per_layer_config": {
            str(i): {"head_dim": local if slides[i] else full, "num_key_value_heads": kv_heads[i]}
            for i in range(layers)
        },
        "attention_k_eq_v": not all(own_values),
        "num_kv_shared_layers": shared,
        "intermediate_size": inner,
        "use_double_wide_mlp": double,
        "hidden_size_per_layer_input": keys.integer("embedding_length_per_layer_input", 0, low=0),
        "vocab_size_per_layer_input": table.shape[0] if table else 1,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": keys.number("rope.freq_base")},
            "sliding_attention": {"rope_type": "default", "rope_theta": local_theta},
        },
    }  # fmt: skip


def gemma4_windows(keys: ArchMetadata, layers: int) -> list[bool]:
    """Which layers slide; the key is required, as llama.cpp requires it."""
    keys.integer("attention.sliding_window")
    return keys.booleans("attention.sliding_window_pattern", layers)


def gemma4_head_dims(keys: ArchMetadata) -> tuple[int, int]:
    """The head size of full and of sliding layers."""
    sizes = []
    for suffix in ("", "_swa"):
        size = keys.integer(f"attention.key_length{suffix}")
        for key in (f"attention.value_length{suffix}", f"rope.dimension_count{suffix}"):
            if keys.integer(key, size) != size:
                raise UnsupportedModel(f"gemma4.{key} is {keys.integer(key)}, the head size {size}")
        sizes.append(size)
    return sizes[0], sizes[1]


def gemma4_widths(keys: ArchMetadata, layers: int, shared: int) -> tuple[int, bool]:
    """The width of the MLPs, and whether those of the last `shared` layers are twice as wide."""
    widths = keys.integers("feed_forward_length", layers)
    if set(widths) == {widths[0]}:
        return widths[0], False
    if widths != [widths[0]] * (layers - shared) + [2 * widths[0]] * shared:
        raise UnsupportedModel("gemma4.feed_forward_length differs between layers in another way than E2B's does")
    return widths[0], True


def gemma4_experts(keys: ArchMetadata) -> Config:
    if not keys.integer("expert_count", 0, low=0):
        return {}
    found = expert_config(keys)
    return {
        "enable_moe_block": True,
        "num_experts": found["num_experts"],
        "top_k_experts": found["num_experts_per_tok"],
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
    }


def gemma4_rope(config: Config, factors: list[float]) -> None:
    """The converter writes that the last pairs of full attention do not rotate as factors."""
    rotated = sum(factor == 1 for factor in factors)
    if factors != [1.0] * rotated + factors[rotated:] or any(f < NO_ROTATION * 0.99 for f in factors[rotated:]):
        raise BadCheckpoint("rope_freqs.weight of gemma4 must be ones, then 1e30 for pairs that do not rotate")
    share = min(1.0, (2 * rotated + 0.5) / (2 * len(factors)))  # half a number more: rounding cannot lose a pair
    config["rope_parameters"]["full_attention"]["partial_rotary_factor"] = share
