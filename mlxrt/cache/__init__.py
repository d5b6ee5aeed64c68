"""KV cache on the host: block tables, layer states, prefix cache. No mlx here: the arrays are in cache/memory."""

from .blocks import Block, BlockPool
from .layer_state import BlockTable, LayerState, RecurrentState, SequenceState
from .prefix_cache import PrefixCache

__all__ = [
    "Block", "BlockPool", "BlockTable", "LayerState", "PrefixCache", "RecurrentState", "SequenceState",
]  # fmt: skip
