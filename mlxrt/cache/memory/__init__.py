"""The device side of the cache: arrays, and what a layer may do with them during a step."""

from .codec import Codec, PlainKV, QuantizedKV
from .external import ExternalKV
from .kv_options import KV, choose
from .layer_spec import TAIL, Arrays, Batch, Group, LayerSpec, LayerView, Shared
from .paged import PagedKV, WindowKV
from .pool_sizing import Plan, plan
from .pools import KVPools
from .recurrent import Recurrent
from .rotating import RotatingKV

__all__ = [
    "KV",
    "TAIL",
    "Arrays",
    "Batch",
    "Codec",
    "ExternalKV",
    "Group",
    "KVPools",
    "LayerSpec",
    "LayerView",
    "PagedKV",
    "PlainKV",
    "Plan",
    "QuantizedKV",
    "Recurrent",
    "RotatingKV",
    "Shared",
    "WindowKV",
    "choose",
    "plan",
]
