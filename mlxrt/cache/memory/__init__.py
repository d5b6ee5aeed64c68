"""The device side of the cache: arrays, and what a layer may do with them during a step."""

from .codec import Codec, Plain, Quantised
from .external import Foreign
from .kv_options import KV, choose
from .layer_spec import TAIL, Arrays, Batch, Group, LayerSpec, LayerView, Shared
from .paged import FullKV, WindowKV
from .pool_sizing import Plan, plan
from .recurrent import Recurrent
from .rotating import RingKV

__all__ = [
    "KV",
    "TAIL",
    "Arrays",
    "Batch",
    "Codec",
    "Foreign",
    "FullKV",
    "Group",
    "LayerSpec",
    "LayerView",
    "Plain",
    "Plan",
    "Quantised",
    "Recurrent",
    "RingKV",
    "Shared",
    "WindowKV",
    "choose",
    "plan",
]
