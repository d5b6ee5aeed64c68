"""Builds config.json from GGUF metadata.

A key that is not read here goes into the config under its GGUF name, where the model's config parser reports it.
"""

import math
from collections.abc import Mapping
from typing import Any

from ....errors import BadCheckpoint, UnsupportedModel, quote
from .architecture_configs import layer_count
from .architectures import ARCHITECTURES, Architecture, read_windows
from .metadata import ArchMetadata
from .names import EXPERTS
from .reader import GGUFTensor

STOPS = ("eos", "eot", "eom")  # end of text, turn and message: a model may stop with any of them

READ_KEYS = {
    "context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size", "expert_count",
    "expert_used_count", "expert_feed_forward_length", "attention.head_count", "attention.head_count_kv",
    "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon", "attention.sliding_window",
    "attention.sliding_window_pattern", "rope.freq_base", "rope.freq_base_swa", "rope.dimension_count",
    "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length",
    "rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.finetuned",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "nextn_predict_layers",
}  # fmt: skip

# Keys that change the arithmetic in ways that are not supported, with their neutral values.
NEUTRAL_VALUES: dict[str, tuple] = {
    "attention.scale": (), "attention.causal": (True,), "attention.max_alibi_bias": (0.0,),
    "attention.clamp_kqv": (0.0,), "attn_logit_softcapping": (0.0,), "final_logit_softcapping": (0.0,),
    "logit_scale": (1.0,), "residual_scale": (1.0,), "embedding_scale": (1.0,), "use_parallel_residual": (False,),
    "rope.scaling.yarn_ext_factor": (1.0,), "rope.scaling.yarn_log_multiplier": (), "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,), "expert_weights_scale": (0.0, 1.0), "expert_weights_norm": (True,),
    "expert_gating_func": (0, 1), "expert_group_count": (0, 1), "router_logit_softcapping": (0.0,),
}  # fmt: skip


def read_architecture(metadata: Mapping[str, Any]) -> str:
    name = metadata.get("general.architecture")
    if not isinstance(name, str):
        raise BadCheckpoint(f"general.architecture must be a string, found {quote(name)}; is the GGUF complete?")
    refuse_companions(metadata, name)
    if name not in ARCHITECTURES:
        raise UnsupportedModel(f"GGUF architecture {quote(name)} is unsupported; supported: {', '.join(ARCHITECTURES)}")
    return name


def refuse_companions(metadata: Mapping[str, Any], name: str) -> None:
    """Files that belong to a model and are none."""
    kind = metadata.get("general.type")
    if kind == "adapter":
        raise UnsupportedModel(f"the GGUF is a LoRA adapter of a {name} model, not a model; give the model's own file")
    if kind == "mmproj" or name == "clip":
        raise UnsupportedModel(
            "the GGUF is a projector of images or sound (mmproj), not a model; give the language model's own file"
        )


def build_config(metadata: Mapping[str, Any], tensors: Mapping[str, GGUFTensor]) -> dict[str, Any]:
    """The config.json of a GGUF model."""
    name = read_architecture(metadata)
    arch, keys = ARCHITECTURES[name], ArchMetadata(metadata, name)
    refuse_unsupported(keys, arch)
    heads, hidden = keys.integer("attention.head_count"), keys.integer("embedding_length")
    config: dict[str, Any] = {
        "architectures": [arch.hub_class],
        "model_type": arch.model_type,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "num_hidden_layers": read_depth(keys, tensors),
        "num_attention_heads": heads,
        "head_dim": read_head_dim(keys, hidden, heads, arch),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": keys.integer("context_length"),
        "rope_theta": keys.number("rope.freq_base", arch.rope_theta),
        "vocab_size": read_vocab_size(metadata, tensors),
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    if not arch.sizes_vary:
        config["num_key_value_heads"] = keys.integer("attention.head_count_kv", heads)
        if arch.dense_mlp or keys.find("feed_forward_length") is not None:
            config["intermediate_size"] = keys.integer("feed_forward_length")
    if scaling := read_rope_scaling(keys, config["max_position_embeddings"], arch):
        config["rope_scaling"] = scaling
    config |= (
        read_biases(name, tensors) | read_windows(keys, arch, config["num_hidden_layers"]) | arch.config(keys, tensors)
    )
    return config | read_special_tokens(metadata, config["vocab_size"]) | unread_keys(keys, arch)


def refuse_unsupported(keys: ArchMetadata, arch: Architecture) -> None:
    """Refuse keys that change the arithmetic and are not supported."""
    for key, neutral in NEUTRAL_VALUES.items():
        value = keys.find(key)
        if value is not None and value not in neutral and key not in arch.extra_keys:
            raise UnsupportedModel(f"the GGUF key {keys.architecture}.{key} = {quote(value)} is not supported")
    if not arch.names.keys() >= EXPERTS.keys() and keys.integer("expert_count", 0, low=0):
        raise UnsupportedModel(
            f"the GGUF key {keys.architecture}.expert_count = {keys.integer('expert_count')}: {keys.architecture} with "
            "experts is not supported"
        )
    base = keys.number("rope.freq_base", arch.rope_theta)
    if arch.local_rope_theta is None and keys.number("rope.freq_base_swa", base) != base:
        raise UnsupportedModel(
            f"the GGUF key {keys.architecture}.rope.freq_base_swa = {keys.find('rope.freq_base_swa')} differs from "
            f"rope.freq_base = {base}: {keys.architecture} has one RoPE base for all layers"
        )


def read_depth(keys: ArchMetadata, tensors: Mapping[str, GGUFTensor]) -> int:
    """The number of layers, at most that of tensors: a damaged count must not make millions."""
    layers = keys.integer("block_count")
    if layers > len(tensors):
        raise keys.wrong("block_count", f"at most the {len(tensors)} tensors of the file")
    return layer_count(keys)


def read_head_dim(keys: ArchMetadata, hidden: int, heads: int, arch: Architecture) -> int:
    size = keys.integer("attention.key_length", hidden // heads or None)
    if keys.find("attention.key_length") is None and hidden % heads:
        raise keys.wrong("attention.key_length", f"given: {hidden} does not divide by {heads} heads")
    for key in ("attention.value_length", *(() if arch.partial_rope else ("rope.dimension_count",))):
        if keys.integer(key, size) != size:
            raise UnsupportedModel(f"{keys.architecture}.{key} is {keys.integer(key)}, the head size {size}")
    return size


def read_vocab_size(metadata: Mapping[str, Any], tensors: Mapping[str, GGUFTensor]) -> int:
    """The rows of the embedding, which files may pad beyond the tokens."""
    table = tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise BadCheckpoint("the GGUF file has no matrix token_embd.weight; is it a vocabulary or an adapter only?")
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    if not isinstance(tokens, list) or len(tokens) > table.shape[0]:
        found = f"{len(tokens)} tokens" if isinstance(tokens, list) else quote(tokens)
        raise BadCheckpoint(f"tokenizer.ggml.tokens has {found}, the embedding {table.shape[0]} rows")
    return table.shape[0]


def read_rope_scaling(keys: ArchMetadata, context: int, arch: Architecture) -> dict[str, Any] | None:
    kind = keys.find("rope.scaling.type")
    if kind is None and keys.find("rope.scale_linear") is not None:  # the older key
        factor = keys.number("rope.scale_linear")
        return {"rope_type": "linear", "factor": factor} if factor != 1 else None
    if kind in (None, "none"):
        return None if arch.yarn_extras is None else {"rope_type": "default"}
    if kind == "longrope" and arch.long_rope:
        return None  # its factors are tensors
    if kind not in ("linear", "yarn"):
        raise UnsupportedModel(f"rope scaling {quote(kind)} is not supported in GGUF; supported: none, linear, yarn")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": keys.number("rope.scaling.factor")}
    return scaling | read_yarn(keys, context, scaling["factor"], arch) if kind == "yarn" else scaling


def read_yarn(keys: ArchMetadata, context: int, factor: float, arch: Architecture) -> dict[str, Any]:
    given: dict[str, Any] = {}
    if keys.find("rope.scaling.original_context_length") is not None:  # else: the file's context length
        given["original_max_position_embeddings"] = keys.integer("rope.scaling.original_context_length", context)
    attention = keys.number("rope.scaling.attn_factor", 1.0)
    if attention != 1:  # llama.cpp multiplies it with YaRN's correction, Hugging Face's value replaces the product
        given["attention_factor"] = attention * (1 + 0.1 * math.log(factor))
    for theirs, ours in (
        ("yarn_beta_fast", "beta_fast"),
        ("yarn_beta_slow", "beta_slow"),
        ("yarn_attn_factor", "attention_factor"),  # Hugging Face's value, unchanged by the converter
    ):
        if keys.find(f"rope.scaling.{theirs}") is not None:
            given[ours] = keys.number(f"rope.scaling.{theirs}")
    return given | dict(arch.yarn_extras or {})


def read_biases(name: str, tensors: Mapping[str, GGUFTensor]) -> dict[str, Any]:
    if name in ("qwen2", "qwen2moe"):
        return {}  # always has biases, and no config key for them
    return {"attention_bias": any(key.endswith(".attn_q.bias") for key in tensors)}


def read_special_tokens(metadata: Mapping[str, Any], vocab: int) -> dict[str, Any]:
    """BOS and stop tokens, if the file names them."""
    found: dict[str, int] = {}
    for role in ("bos", *STOPS):
        token = metadata.get(f"tokenizer.ggml.{role}_token_id")
        if token is None:
            continue
        if type(token) is not int or not 0 <= token < vocab:
            raise BadCheckpoint(f"tokenizer.ggml.{role}_token_id must be an id below {vocab}, found {quote(token)}")
        found[role] = token
    stops = list(dict.fromkeys(found[role] for role in STOPS if role in found))
    return ({"bos_token_id": found["bos"]} if "bos" in found else {}) | ({"eos_token_id": stops} if stops else {})


def unread_keys(keys: ArchMetadata, arch: Architecture) -> dict[str, Any]:
    prefix = f"{keys.architecture}."
    known = {prefix + key for key in READ_KEYS | NEUTRAL_VALUES.keys() | arch.extra_keys}
    return {key: value for key, value in keys.metadata.items() if key.startswith(prefix) and key not in known}
