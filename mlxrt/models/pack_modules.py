"""Puts modules that CPU kernels compute in the place of MLX's: of quantised ones, and of those of 16 bits."""

import mlx.core as mx
import mlx.nn as nn

from ..kernels import Kernels, QuantizedMatrix
from ..kernels.dtypes import HALVES
from .base import CausalLM
from .moe import ExpertLinear, QuantizedExpertLinear
from .quantized.packed_linear import PackedEmbedding, PackedExpertLinear, PackedLinear, read_matrix, set_matrix

Packed = PackedLinear | PackedEmbedding | PackedExpertLinear


def is_mlx_layer(module: nn.Module) -> bool:
    return type(module) in (nn.QuantizedLinear, QuantizedExpertLinear) or isinstance(module, nn.QuantizedEmbedding)


def is_plain_layer(module: nn.Module) -> bool:
    """A layer of floats."""
    return type(module) in (nn.Linear, nn.Embedding, ExpertLinear)


def is_half_layer(module: nn.Module) -> bool:
    """A layer of floats of 16 bits."""
    return is_plain_layer(module) and module.weight.dtype in HALVES


def has_packed_layers(model: CausalLM) -> bool:
    """Whether the kernels have something to compute; a model of another library is left as it is."""
    if model.is_adapter:
        return False
    return any(is_mlx_layer(m) or is_half_layer(m) or isinstance(m, Packed) for m in model.modules())


def pack_modules(model: CausalLM, kernels: Kernels) -> int:
    """Replace MLX's quantised layers, and those of 16 bits, by packed ones, where the kernels read them, and interleave
    rows of matrices that they read faster so; how many of these there are."""
    for parent in model.modules():
        for name, module in parent.children().items():
            if (is_mlx_layer(module) or is_half_layer(module)) and (made := pack_module(module)) is not None:
                made.kernels = kernels
                parent[name] = made
    packed = [module for module in model.modules() if isinstance(module, Packed)]
    if kernels.cpu is not None:
        for module in packed:
            set_matrix(module, module.matrix.interleave(kernels.cpu.rows_together(module.mode)))
            mx.eval(module.parameters())  # one at a time: both layouts exist together
    return len(packed)


def widen_halves(model: CausalLM) -> None:
    """In float32 what is left in 16 bits, because no kernel reads it."""
    for module in model.modules():
        if is_half_layer(module):
            module.weight = module.weight.astype(mx.float32)
            mx.eval(module.weight)  # one at a time


def pack_module(module: nn.Module) -> Packed | None:
    """The same layer for CPU kernels; None where they do not read its format."""
    matrix = QuantizedMatrix(module.weight) if is_plain_layer(module) else read_matrix(module)
    experts = isinstance(module, ExpertLinear | QuantizedExpertLinear)
    if matrix.cpu_unsupported(mx.float32, stack=experts):
        return None
    if isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
        return PackedEmbedding(matrix)
    return (PackedExpertLinear if experts else PackedLinear)(matrix, module.get("bias"))
