"""KV cache on the device: specs and arrays per kind of cache, pools, and the views that models see."""

from ...kernels import Codec, PlainKV, QuantizedKV
from .external import ExternalKV
from .kv_options import KV, apply_kv_options
from .layer_spec import TAIL, Arrays, Batch, Group, LayerSpec, LayerView, Shared, TailPiece, TailSpan
from .paged import PagedKV, RotatingKV, WindowKV
from .pool_sizing import PoolSizes, size_pools
from .pools import KVPools
from .recurrent import Recurrent

__all__ = [
    "KV", "TAIL", "Arrays", "Batch", "Codec", "ExternalKV", "Group", "KVPools", "LayerSpec", "LayerView", "PagedKV",
    "PlainKV", "PoolSizes", "QuantizedKV", "Recurrent", "RotatingKV", "Shared", "TailPiece", "TailSpan",
    "WindowKV", "apply_kv_options", "size_pools",
]  # fmt: skip
