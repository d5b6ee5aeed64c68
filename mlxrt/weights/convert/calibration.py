"""What the inputs of a model's MLPs look like on a text: the mean square of each, by the matrix that reads them.

A weight that meets large inputs costs more when it is stored wrongly; `weights.encode` weighs errors by this.
"""

from collections.abc import Iterator

import mlx.core as mx
import mlx.nn as nn

from ...engine.engine import Engine
from .importance import Importance

READERS = {"gate_up_proj": ("gate_proj", "up_proj"), "gate_proj": ("gate_proj",), "up_proj": ("up_proj",)}
READERS |= {"down_proj": ("down_proj",)}


class Watched(nn.Module):
    """A linear layer, or a stack of experts', that remembers what it was given."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner, self._sum, self._count = inner, mx.array(0.0), 0

    def __call__(self, x: mx.array, *more: mx.array, **options: bool) -> mx.array:
        inputs = x.astype(mx.float32).reshape(-1, x.shape[-1])
        self._sum, self._count = self._sum + (inputs * inputs).sum(axis=0), self._count + inputs.shape[0]
        return self.inner(x, *more, **options)

    def squares(self) -> mx.array:
        return self._sum / self._count


def importance(engine: Engine, tokens: list[int]) -> Importance:
    """Of an engine without kernels, which would not call the layers."""
    if engine.model.kernels.gpu is not None:
        raise ValueError('inputs are seen with kernels="reference" only')
    watched = [(path, parent, name, Watched(parent[name])) for path, parent, name in mlps(engine.model)]
    for _, parent, name, layer in watched:
        parent[name] = layer
    try:
        mx.eval(engine.score(tokens))
    finally:
        for _, parent, name, layer in watched:
            parent[name] = layer.inner
    found = {
        f"{path}.{reader}.weight": layer.squares()
        for path, _, name, layer in watched
        for reader in READERS[name]
        if layer._count
    }
    mx.eval(found)
    return Importance.of(tokens, found)


def mlps(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """(path of a module, the module, the name of a matrix of an MLP in it)."""
    for path, module in model.named_modules():
        for name in READERS:
            if isinstance(module.get(name), nn.Module):
                yield path, module, name
