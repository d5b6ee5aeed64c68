"""Which file computes which `model_type`."""

from importlib import import_module

from ..errors import BadCheckpoint, quote
from .base import CausalLM

# model_type -> (module, class). Imported when asked for: a run needs one family.
FAMILIES = {
    "gemma2": ("gemma2", "Gemma2"),
    "gemma3": ("gemma3", "Gemma3"),
    "gemma3_text": ("gemma3", "Gemma3"),
    "gemma4": ("gemma4", "Gemma4"),
    "gemma4_text": ("gemma4", "Gemma4"),
    "gpt_oss": ("gpt_oss", "GptOss"),
    "llama": ("llama", "Llama"),
    "minimax_m2": ("minimax_m2", "MiniMaxM2"),
    "mistral": ("mistral", "Mistral"),
    "mixtral": ("mixtral", "Mixtral"),
    "phi3": ("phi3", "Phi3"),
    "qwen2": ("qwen2", "Qwen2"),
    "qwen2_moe": ("qwen2_moe", "Qwen2MoE"),
    "qwen3": ("qwen3", "Qwen3"),
    "qwen3_5": ("qwen3_5", "Qwen35"),
    "qwen3_5_moe": ("qwen3_5", "Qwen35Moe"),
    "qwen3_5_moe_text": ("qwen3_5", "Qwen35Moe"),
    "qwen3_5_text": ("qwen3_5", "Qwen35"),
    "qwen3_moe": ("qwen3_moe", "Qwen3MoE"),
    "qwen3_next": ("qwen3_next", "Qwen3Next"),
}


def find(raw: dict) -> type[CausalLM]:
    """The class that computes this config.json."""
    kind = raw.get("model_type")
    if not isinstance(kind, str):
        raise BadCheckpoint(f"config.json has no model_type (found {quote(kind)})")
    if kind not in FAMILIES:
        from .mlx_lm_adapter import find_adapter

        return find_adapter(kind, ", ".join(sorted(FAMILIES)))
    module, name = FAMILIES[kind]
    return getattr(import_module(f".{module}", __name__), name)


__all__ = ["FAMILIES", "CausalLM", "find"]
