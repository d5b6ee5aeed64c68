"""A GGUF file's metadata as the config.json its model would have had.

Knows the keys of the architectures mlxrt runs from GGUF. Refuses to guess: a key it does not read goes into the
config under its GGUF name, where the model's own config reader says that it is unknown.
"""

import math
from collections.abc import Mapping
from typing import Any

from ....errors import BadCheckpoint, UnsupportedModel, shown
from .families import EXPERTS, FAMILIES, Family, windows
from .header import TensorRecord
from .keys import Keys

STOPS = ("eos", "eot", "eom")  # end of text, of turn, of message: a model may end its answer with any of them

READ = {
    "context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size", "expert_count",
    "expert_used_count", "expert_feed_forward_length", "attention.head_count", "attention.head_count_kv",
    "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon", "attention.sliding_window",
    "attention.sliding_window_pattern", "rope.freq_base", "rope.freq_base_swa", "rope.dimension_count",
    "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length",
    "rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.finetuned",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
}  # fmt: skip

# Keys that change the arithmetic in ways most families do not have, with the values that mean "as usual".
NEUTRAL: dict[str, tuple] = {
    "attention.scale": (), "attention.causal": (True,), "attention.max_alibi_bias": (0.0,),
    "attention.clamp_kqv": (0.0,), "attn_logit_softcapping": (0.0,), "final_logit_softcapping": (0.0,),
    "logit_scale": (1.0,), "residual_scale": (1.0,), "embedding_scale": (1.0,), "use_parallel_residual": (False,),
    "rope.scaling.yarn_ext_factor": (1.0,), "rope.scaling.yarn_log_multiplier": (), "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,), "expert_weights_scale": (0.0, 1.0), "expert_weights_norm": (True,),
    "expert_gating_func": (0, 1), "expert_group_count": (0, 1), "router_logit_softcapping": (0.0,),
}  # fmt: skip


def architecture(metadata: Mapping[str, Any]) -> str:
    name = metadata.get("general.architecture")
    if not isinstance(name, str):
        raise BadCheckpoint(f"general.architecture must be a string, found {shown(name)}; is this a whole GGUF model?")
    if name not in FAMILIES:
        raise UnsupportedModel(f"GGUF architecture {shown(name)} is not supported; supported: {', '.join(FAMILIES)}")
    return name


def synthesise(metadata: Mapping[str, Any], tensors: Mapping[str, TensorRecord]) -> dict[str, Any]:
    """The config.json of a GGUF model."""
    name = architecture(metadata)
    family, keys = FAMILIES[name], Keys(metadata, name)
    refuse(keys, family)
    heads, hidden = keys.whole("attention.head_count"), keys.whole("embedding_length")
    config: dict[str, Any] = {
        "architectures": [family.hub_class],
        "model_type": family.model_type,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "num_hidden_layers": depth(keys, tensors),
        "intermediate_size": keys.whole("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.whole("attention.head_count_kv", heads),
        "head_dim": head_dim(keys, hidden, heads),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": keys.whole("context_length"),
        "rope_theta": keys.number("rope.freq_base", family.base),
        "vocab_size": vocabulary(metadata, tensors),
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    if scaling := rope_scaling(keys, config["max_position_embeddings"], family):
        config["rope_scaling"] = scaling
    config |= biases(name, tensors) | windows(keys, family, config["num_hidden_layers"]) | family.config(keys, tensors)
    return config | ends(metadata, config["vocab_size"]) | unread(keys, family)


def refuse(keys: Keys, family: Family) -> None:
    """What would change the arithmetic and is not computed."""
    for key, neutral in NEUTRAL.items():
        value = keys.find(key)
        if value is not None and value not in neutral and key not in family.reads:
            raise UnsupportedModel(f"the GGUF key {keys.architecture}.{key} = {shown(value)} is not supported")
    if not family.names.keys() >= EXPERTS.keys() and keys.whole("expert_count", 0, low=0):
        raise UnsupportedModel(
            f"the GGUF key {keys.architecture}.expert_count = {keys.whole('expert_count')}: {keys.architecture} with "
            "experts is not supported"
        )
    base = keys.number("rope.freq_base", family.base)
    if family.local_base is None and keys.number("rope.freq_base_swa", base) != base:
        raise UnsupportedModel(
            f"the GGUF key {keys.architecture}.rope.freq_base_swa = {keys.find('rope.freq_base_swa')} differs from "
            f"rope.freq_base = {base}: layers of {keys.architecture} turn alike"
        )


def depth(keys: Keys, tensors: Mapping[str, TensorRecord]) -> int:
    """Layers; every one has tensors, so that a damaged count cannot make millions."""
    layers = keys.whole("block_count")
    if layers > len(tensors):
        raise keys.wrong("block_count", f"at most the {len(tensors)} tensors of the file")
    return layers


def head_dim(keys: Keys, hidden: int, heads: int) -> int:
    size = keys.whole("attention.key_length", hidden // heads or None)
    if keys.find("attention.key_length") is None and hidden % heads:
        raise keys.wrong("attention.key_length", f"given: {hidden} does not divide by {heads} heads")
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.whole(key, size) != size:
            raise UnsupportedModel(
                f"{keys.architecture}.{key} is {keys.whole(key)}, the head size {size}: unequal ones are not supported"
            )
    return size


def vocabulary(metadata: Mapping[str, Any], tensors: Mapping[str, TensorRecord]) -> int:
    """The rows of the embedding: files may pad it beyond the tokens."""
    table = tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise BadCheckpoint("the GGUF file has no matrix token_embd.weight; is it a vocabulary or an adapter only?")
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    if not isinstance(tokens, list) or len(tokens) > table.shape[0]:
        found = f"{len(tokens)} tokens" if isinstance(tokens, list) else shown(tokens)
        raise BadCheckpoint(f"tokenizer.ggml.tokens has {found}, the embedding {table.shape[0]} rows")
    return table.shape[0]


def rope_scaling(keys: Keys, context: int, family: Family) -> dict[str, Any] | None:
    kind = keys.find("rope.scaling.type")
    if kind is None and keys.find("rope.scale_linear") is not None:  # the spelling before rope.scaling.*
        factor = keys.number("rope.scale_linear")
        return {"rope_type": "linear", "factor": factor} if factor != 1 else None
    if kind in (None, "none"):
        return None if family.scaled is None else {"rope_type": "default"}
    if kind not in ("linear", "yarn"):
        raise UnsupportedModel(f"rope scaling {shown(kind)} is not supported in GGUF; supported: none, linear, yarn")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": keys.number("rope.scaling.factor")}
    return scaling | yarn(keys, context, scaling["factor"], family) if kind == "yarn" else scaling


def yarn(keys: Keys, context: int, factor: float, family: Family) -> dict[str, Any]:
    given: dict[str, Any] = {
        "original_max_position_embeddings": keys.whole("rope.scaling.original_context_length", context)
    }
    attention = keys.number("rope.scaling.attn_factor", 1.0)
    if attention != 1:  # llama.cpp multiplies it onto YaRN's own correction, Hugging Face replaces the product
        given["attention_factor"] = attention * (1 + 0.1 * math.log(factor))
    for theirs, ours in (
        ("yarn_beta_fast", "beta_fast"),
        ("yarn_beta_slow", "beta_slow"),
        ("yarn_attn_factor", "attention_factor"),  # Hugging Face's number, as the converter found it
    ):
        if keys.find(f"rope.scaling.{theirs}") is not None:
            given[ours] = keys.number(f"rope.scaling.{theirs}")
    return given | dict(family.scaled or {})


def biases(name: str, tensors: Mapping[str, TensorRecord]) -> dict[str, Any]:
    if name == "qwen2":
        return {}  # its biases are part of the architecture, not of the config
    return {"attention_bias": "blk.0.attn_q.bias" in tensors}


def ends(metadata: Mapping[str, Any], vocab: int) -> dict[str, Any]:
    """Beginning and end tokens, when the file names them."""
    found: dict[str, int] = {}
    for role in ("bos", *STOPS):
        token = metadata.get(f"tokenizer.ggml.{role}_token_id")
        if token is None:
            continue
        if type(token) is not int or not 0 <= token < vocab:
            raise BadCheckpoint(
                f"tokenizer.ggml.{role}_token_id must be a token id below {vocab}, found {shown(token)}"
            )
        found[role] = token
    stops = list(dict.fromkeys(found[role] for role in STOPS if role in found))
    return ({"bos_token_id": found["bos"]} if "bos" in found else {}) | ({"eos_token_id": stops} if stops else {})


def unread(keys: Keys, family: Family) -> dict[str, Any]:
    prefix = f"{keys.architecture}."
    known = {prefix + key for key in READ | NEUTRAL.keys() | family.reads}
    return {key: value for key, value in keys.metadata.items() if key.startswith(prefix) and key not in known}
