"""Sequence state: the layer states of one sequence, together with the tokens they hold."""

from ..errors import CacheCorrupt
from .layer_state import LayerState


class SequenceState:
    """Tokens and parts (one LayerState per group of layers) change together or not at all."""

    def __init__(self, tokens: tuple[int, ...], parts: tuple[LayerState, ...]):
        for i, part in enumerate(parts):
            if part.length != len(tokens):
                raise CacheCorrupt(f"group {i} holds {part.length} tokens, the sequence {len(tokens)}")
        self.tokens, self.parts = tokens, parts

    @classmethod
    def fit(cls, tokens: tuple[int, ...], parts: tuple[LayerState, ...]) -> "SequenceState":
        """From parts that may hold more than the tokens: the longest state that both have."""
        n = min(len(tokens), *(part.length for part in parts))
        n = n if n >= max(part.floor for part in parts) else 0
        return cls(tokens[:n], tuple(part.rewind(n) for part in parts))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def floor(self) -> int:
        return max(part.floor for part in self.parts)

    def rewind(self, n: int) -> "SequenceState":
        return SequenceState(self.tokens[:n], tuple(part.rewind(n) for part in self.parts))
