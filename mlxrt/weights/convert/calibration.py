"""Calibration: the mean square of every MLP input on a sample text, by the matrix that reads it.

An error in a weight costs more where its inputs are large; learning a codebook weights errors by this.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import mlx.core as mx
import mlx.nn as nn

from ...models import CausalLM

MIN_IMPORTANCE = 0.01  # of the mean: an input that one text never used may be used by another
READERS = {"gate_up_proj": ("gate_proj", "up_proj"), "gate_proj": ("gate_proj",), "up_proj": ("up_proj",)}
READERS |= {"down_proj": ("down_proj",)}


@dataclass(frozen=True)
class Importance:
    """Mean squares of inputs [in] by tensor name, on the text with this `digest`. Empty: all inputs count equally."""

    digest: str = ""
    squares: Mapping[str, mx.array] = field(default_factory=dict)

    @classmethod
    def from_squares(cls, tokens: Iterable[int], squares: Mapping[str, mx.array]) -> "Importance":
        return cls(hashlib.sha256(repr(list(tokens)).encode()).hexdigest(), squares)

    def __call__(self, name: str, width: int) -> mx.array:
        """[width], about 1 each."""
        squares = self.squares.get(name)
        if squares is None:
            return mx.ones(width)
        return squares / mx.maximum(squares.mean(), 1e-30) + MIN_IMPORTANCE


class ActivationRecorder(nn.Module):
    """Wraps a linear layer, or a stack of experts', and accumulates the squares of its inputs."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner, self._sum, self._count = inner, mx.array(0.0), 0

    def __call__(self, x: mx.array, *more: mx.array, **options: bool) -> mx.array:
        inputs = x.astype(mx.float32).reshape(-1, x.shape[-1])
        self._sum, self._count = self._sum + (inputs * inputs).sum(axis=0), self._count + inputs.shape[0]
        return self.inner(x, *more, **options)

    def mean_squares(self) -> mx.array | None:
        """None for a layer that was never called."""
        return self._sum / self._count if self._count else None


def calibrate(model: CausalLM, score: Callable[[list[int]], mx.array], tokens: list[int]) -> Importance:
    """Record the inputs of all MLPs while `score` runs the model on the tokens.

    Needs a model without kernels, which would bypass the layers.
    """
    if model.kernels.gpu is not None:
        raise ValueError('calibration needs kernels="reference"')
    recorders = [(path, parent, name, ActivationRecorder(parent[name])) for path, parent, name in find_mlps(model)]
    for _, parent, name, recorder in recorders:
        parent[name] = recorder
    try:
        mx.eval(score(tokens))
    finally:
        for _, parent, name, recorder in recorders:
            parent[name] = recorder.inner
    squares = {
        f"{path}.{reader}.weight": mean
        for path, _, name, recorder in recorders
        for reader in READERS[name]
        if (mean := recorder.mean_squares()) is not None
    }
    mx.eval(squares)
    return Importance.from_squares(tokens, squares)


def find_mlps(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """(path of a module, the module, the name of a matrix of an MLP in it)."""
    for path, module in model.named_modules():
        for name in READERS:
            if isinstance(module.get(name), nn.Module):
                yield path, module, name
