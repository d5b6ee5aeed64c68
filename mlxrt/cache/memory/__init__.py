"""The device side of the cache: arrays, and what a layer may do with them during a step."""

from .codec import Plain
from .kv import FullKV, WindowKV
from .spec import TAIL, Arrays, Batch, Group, LayerSpec, LayerView, Shared, groups

__all__ = [
    "TAIL",
    "Arrays",
    "Batch",
    "FullKV",
    "Group",
    "LayerSpec",
    "LayerView",
    "Plain",
    "Shared",
    "WindowKV",
    "groups",
]
