"""Who holds what, on the host. Nothing here imports mlx: a state names places, the arrays are in cache/memory."""

from .blocks import Block, BlockPool
from .layer_state import BlockTable, LayerState, RecurrentState, RotatingState
from .prefix_cache import PrefixCache
from .sequence import SequenceState

__all__ = [
    "Block",
    "BlockPool",
    "BlockTable",
    "LayerState",
    "PrefixCache",
    "RecurrentState",
    "RotatingState",
    "SequenceState",
]
