"""A GGUF file's metadata as the config.json its model would have had.

Knows the keys of the architectures mlxrt runs from GGUF. Refuses to guess: a key it does not read goes into the
config under its GGUF name, where the model's own config reader says that it is unknown.
"""

import math
from collections.abc import Mapping
from typing import Any

from ..errors import BadCheckpoint, UnsupportedModel, shown
from .gguf_directory import TensorRecord

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
STOPS = ("eos", "eot", "eom")  # end of text, of turn, of message: a model may end its answer with any of them

READ = {
    "context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size", "expert_count",
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.layer_norm_rms_epsilon", "attention.sliding_window", "rope.freq_base", "rope.dimension_count",
    "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length",
    "rope.scaling.attn_factor", "rope.scaling.finetuned", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
    "expert_used_count",
}  # fmt: skip

# Keys that change the arithmetic in ways the families do not have, with the value that means "as usual".
NEUTRAL = {
    "attention.scale": None, "attention.causal": True, "attention.max_alibi_bias": 0.0, "attention.clamp_kqv": 0.0,
    "attn_logit_softcapping": 0.0, "final_logit_softcapping": 0.0, "logit_scale": 1.0, "residual_scale": 1.0,
    "embedding_scale": 1.0, "use_parallel_residual": False, "rope.scaling.yarn_ext_factor": 1.0,
}  # fmt: skip


class Keys:
    """The metadata of one architecture, each value checked for its type as it is read."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str):
        self.metadata, self.architecture = metadata, architecture

    def find(self, key: str) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}")

    def wrong(self, key: str, expected: str) -> BadCheckpoint:
        found = "nothing" if self.find(key) is None else shown(self.find(key))
        return BadCheckpoint(
            f"the GGUF key {self.architecture}.{key} must be {expected}, found {found}; convert the model again"
        )

    def whole(self, key: str, default: int | None = None, low: int = 1) -> int:
        value = self.find(key)
        if isinstance(value, list) and value and all(v == value[0] for v in value):
            value = value[0]  # one number per layer, all equal
        elif isinstance(value, list) and value:
            raise UnsupportedModel(
                f"{self.architecture}.{key} differs between layers, which mlxrt does not support yet"
            )
        if value is None and default is not None:
            return default
        if type(value) is not int or not low <= value < 2**31:
            raise self.wrong(key, f"a whole number >= {low}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.find(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise self.wrong(key, "a finite number > 0")
        return float(value)


def architecture(metadata: Mapping[str, Any]) -> str:
    name = metadata.get("general.architecture")
    if not isinstance(name, str):
        raise BadCheckpoint(f"general.architecture must be a string, found {shown(name)}; is this a whole GGUF model?")
    if name not in ARCHITECTURES:
        raise UnsupportedModel(
            f"GGUF architecture {shown(name)} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    return name


def synthesise(metadata: Mapping[str, Any], tensors: Mapping[str, TensorRecord]) -> dict[str, Any]:
    """The config.json of a GGUF model."""
    name = architecture(metadata)
    keys = Keys(metadata, name)
    refuse(keys)
    heads, hidden = keys.whole("attention.head_count"), keys.whole("embedding_length")
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[name]],
        "model_type": name,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "num_hidden_layers": keys.whole("block_count"),
        "intermediate_size": keys.whole("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.whole("attention.head_count_kv", heads),
        "head_dim": head_dim(keys, hidden, heads),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": keys.whole("context_length"),
        "rope_theta": keys.number(
            "rope.freq_base", 10000.0
        ),  # writers leave the key out when it is this, GGUF's default
        "vocab_size": vocabulary(metadata, tensors),
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    if scaling := rope_scaling(keys, config["max_position_embeddings"]):
        config["rope_scaling"] = scaling
    return config | biases(name, tensors) | window(keys) | ends(metadata, config["vocab_size"]) | unread(keys)


def refuse(keys: Keys) -> None:
    if keys.whole("expert_count", 0, low=0) > 0:
        raise UnsupportedModel(
            f"GGUF {keys.architecture} with {keys.whole('expert_count')} experts is not supported yet"
        )
    for key, neutral in NEUTRAL.items():
        value = keys.find(key)
        if value is not None and value != neutral:
            raise UnsupportedModel(f"the GGUF key {keys.architecture}.{key} = {shown(value)} is not supported")


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


def rope_scaling(keys: Keys, context: int) -> dict[str, Any] | None:
    kind = keys.find("rope.scaling.type")
    if kind is None and keys.find("rope.scale_linear") is not None:  # the spelling before rope.scaling.*
        factor = keys.number("rope.scale_linear")
        return {"rope_type": "linear", "factor": factor} if factor != 1 else None
    if kind in (None, "none"):
        return None
    if kind not in ("linear", "yarn"):
        raise UnsupportedModel(f"rope scaling {shown(kind)} is not supported in GGUF; supported: none, linear, yarn")
    factor = keys.number("rope.scaling.factor")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = keys.whole("rope.scaling.original_context_length", context)
        attention = keys.number("rope.scaling.attn_factor", 1.0)
        if attention != 1:  # llama.cpp multiplies it onto YaRN's own correction, Hugging Face replaces the product
            scaling["attention_factor"] = attention * (1 + 0.1 * math.log(factor))
        for theirs, ours in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if keys.find(f"rope.scaling.{theirs}") is not None:
                scaling[ours] = keys.number(f"rope.scaling.{theirs}")
    return scaling


def biases(name: str, tensors: Mapping[str, TensorRecord]) -> dict[str, Any]:
    if name == "qwen2":
        return {}  # its biases are part of the architecture, not of the config
    found = {"attention_bias": "blk.0.attn_q.bias" in tensors}
    return found | ({"mlp_bias": "blk.0.ffn_gate.bias" in tensors} if name == "llama" else {})


def window(keys: Keys) -> dict[str, Any]:
    size = keys.whole("attention.sliding_window", 0, low=0)
    if not size:
        return {}
    if keys.architecture != "llama":
        raise UnsupportedModel(
            f"{keys.architecture}.attention.sliding_window = {size}: GGUF does not say for which layers"
        )
    return {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": size}


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


def unread(keys: Keys) -> dict[str, Any]:
    prefix = f"{keys.architecture}."
    known = {prefix + key for key in READ | NEUTRAL.keys()}
    return {key: value for key, value in keys.metadata.items() if key.startswith(prefix) and key not in known}
