"""Models of published shapes with random weights: the same ones in every script."""

import mlx.core as mx

from mlxrt.kernels import Kernels, backend, make_gpu
from mlxrt.models import find
from mlxrt.weights.random_models import Shape, random_weights
from mlxrt.weights.source.cache_dir import cache_root


def drawn(shape, dtype=mx.bfloat16, layers=None):
    """(the shape, a model whose matrices lie as they would in a file)."""
    asked = Shape.parse(f"shape:{shape}")
    config = asked.config if layers is None else {**asked.config, "num_hidden_layers": layers}
    family = find(config)
    model = family(family.parse(config))
    random_weights(model, asked.bits, dtype, mode=asked.mode, group_size=asked.group_size)
    return asked, model


def fused(model, mode="auto"):
    """The model as engines want it."""
    model.fuse(Kernels(mode, make_gpu(backend(), folder=cache_root() / "kernels"), print))
    mx.eval(model.parameters())
    return model
