"""Which file computes which `model_type`."""

from importlib import import_module

from ..errors import BadCheckpoint, UnsupportedModel, shown
from .base import CausalLM

# model_type -> (module, class). Imported when asked for: a run needs one family.
FAMILIES = {
    "llama": ("llama", "Llama"),
    "mistral": ("mistral", "Mistral"),
    "qwen2": ("qwen2", "Qwen2"),
    "qwen3": ("qwen3", "Qwen3"),
}


def find(raw: dict) -> type[CausalLM]:
    """The class that computes this config.json."""
    kind = raw.get("model_type")
    if not isinstance(kind, str):
        raise BadCheckpoint(f"config.json has no model_type (found {shown(kind)})")
    if kind not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise UnsupportedModel(f"model_type {shown(kind)} is not supported; supported: {known}")
    module, name = FAMILIES[kind]
    return getattr(import_module(f".{module}", __name__), name)


__all__ = ["FAMILIES", "CausalLM", "find"]
