"""All memory of one sequence, together with the tokens in it."""

from ..errors import CacheCorrupt
from .layer_state import LayerState


class SequenceState:
    """The tokens and the parts (one per group of layers) change together or not at all."""

    def __init__(self, tokens: tuple[int, ...], parts: tuple[LayerState, ...]):
        for i, part in enumerate(parts):
            if part.length != len(tokens):
                raise CacheCorrupt(f"group {i} holds {part.length} tokens, the sequence {len(tokens)}")
        self.tokens, self.parts = tokens, parts

    @classmethod
    def fit(cls, tokens: tuple[int, ...], parts: tuple[LayerState, ...]) -> "SequenceState":
        """Parts that may hold more than the tokens, cut back to where both exist."""
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
