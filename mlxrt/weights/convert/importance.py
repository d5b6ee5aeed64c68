"""How much each input of a matrix counts when its weights are rounded."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import mlx.core as mx

LEAST = 0.01  # of the mean: an input that one text never used may be used by another


@dataclass(frozen=True)
class Importance:
    """Mean squares of inputs [in] by a tensor's name, of a text that `digest` names. Without any all count alike."""

    digest: str = ""
    squares: Mapping[str, mx.array] = field(default_factory=dict)

    @classmethod
    def of(cls, tokens: Iterable[int], squares: Mapping[str, mx.array]) -> "Importance":
        return cls(hashlib.sha256(repr(list(tokens)).encode()).hexdigest(), squares)

    def __call__(self, name: str, width: int) -> mx.array:
        """[width], about 1 each."""
        squares = self.squares.get(name)
        if squares is None:
            return mx.ones(width)
        return squares / mx.maximum(squares.mean(), 1e-30) + LEAST
