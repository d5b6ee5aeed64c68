"""Who holds what, on the host. Nothing here imports mlx: a state names places, the arrays are in cache/memory."""

from .blocks import Block, BlockPool
from .sequence import SequenceState
from .states import BlockTable, LayerState, Ring, Slot
from .store import PrefixStore

__all__ = ["Block", "BlockPool", "BlockTable", "LayerState", "PrefixStore", "Ring", "SequenceState", "Slot"]
