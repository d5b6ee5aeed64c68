"""The device side of the cache: arrays, and what a layer may do with them during a step."""

from .choose import KV, choose
from .codec import Codec, Plain, Quantised
from .foreign import Foreign
from .kv import FullKV, WindowKV
from .plan import Plan, plan
from .recurrent import Recurrent
from .ring import RingKV
from .spec import TAIL, Arrays, Batch, Group, LayerSpec, LayerView, Shared

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
