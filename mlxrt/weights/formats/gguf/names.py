"""GGUF's tensor names and Hugging Face's.

A table maps a module (`attn_q`), whatever the part (weight, bias, ...), or one tensor with its part (`ssm_dt.bias`).
"""

import re
from collections.abc import Mapping

from ....kernels.ops.k_quants import TENSOR_NAMES

GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",  # Gemma 4's; unknown to other models, which report them
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}  # fmt: skip
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
FUSED_EXPERTS = EXPERTS | {"ffn_gate_up_exps": "mlp.experts.gate_up_proj"}
SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate", "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj", "ffn_down_shexp": "mlp.shared_expert.down_proj",
}  # fmt: skip
POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
GPT_OSS = {
    "ffn_gate_inp": "mlp.router", "post_attention_norm": "post_attention_layernorm",
    "attn_sinks.weight": "self_attn.sinks",
}  # fmt: skip
MINIMAX_M2 = {"exp_probs_b.bias": "mlp.e_score_correction_bias"}
DELTA_NET = {
    "post_attention_norm": "post_attention_layernorm", "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z", "ssm_beta": "linear_attn.in_proj_b", "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_ba": "linear_attn.in_proj_ba", "ssm_in": "linear_attn.in_proj_qkvz", "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm", "ssm_out": "linear_attn.out_proj", "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
}  # fmt: skip
GEMMA_4 = POST_NORMS | {
    "layer_output_scale.weight": "layer_scalar", "inp_gate": "per_layer_input_gate", "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm", "ffn_gate_inp": "router.proj", "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale", "ffn_gate_exps": "experts.gate_proj",
    "ffn_up_exps": "experts.up_proj", "ffn_down_exps": "experts.down_proj",
    "ffn_gate_up_exps": "experts.gate_up_proj", "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1", "post_ffw_norm_2": "post_feedforward_layernorm_2",
}  # fmt: skip
PHI_3 = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
# Modules of our models that files have in one: its rows are theirs, one after the other.
JOINED_PHI_3 = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
JOINED_GEMMA_4 = {"experts.gate_up_proj": ("experts.gate_proj", "experts.up_proj")}
JOINED_BETA_ALPHA = {"linear_attn.in_proj_ba": ("linear_attn.in_proj_b", "linear_attn.in_proj_a")}

MODEL_LAYER = re.compile(r"model\.layers\.(\d{1,6})\.(.+)")
LAYER = re.compile(r"blk\.(\d{1,6})\.(.+)")
PART = re.compile(rf"(\w+)\.({'|'.join(('weight', 'bias', 'scales', 'biases', *TENSOR_NAMES))})")


def rename(name: str, layer_names: Mapping[str, str]) -> str:
    """The Hugging Face name; an unknown one stays, and building the model reports it."""
    found = LAYER.fullmatch(name)
    prefix, rest, table = (f"model.layers.{found[1]}.", found[2], layer_names) if found else ("", name, GLOBAL_NAMES)
    if rest in table:
        return prefix + table[rest]
    part = PART.fullmatch(rest)
    return f"{prefix}{table[part[1]]}.{part[2]}" if part and part[1] in table else name


def restore(name: str, layer_names: Mapping[str, str]) -> str | None:
    """The GGUF name of a Hugging Face one: `rename` backwards. Of two names for one module the table's later one."""
    found = MODEL_LAYER.fullmatch(name)
    prefix, rest, table = (f"blk.{found[1]}.", found[2], layer_names) if found else ("", name, GLOBAL_NAMES)
    backwards = {module: stem for stem, module in table.items()}
    if rest in backwards:
        return prefix + backwards[rest]
    module, _, part = rest.rpartition(".")
    return f"{prefix}{backwards[module]}.{part}" if module in backwards else None


def layer_of(name: str) -> int | None:
    found = LAYER.fullmatch(name)
    return int(found[1]) if found else None
