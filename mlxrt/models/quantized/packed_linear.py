"""Linear layers and embeddings whose matrices stay packed on a CPU, computed by the kernels of kernels/cpu.

MLX's own products with packed matrices crawl there. Modules of their own, because everything that calls a linear layer
must come to these kernels, not only what fuses it with its neighbours.
"""

import mlx.core as mx
import mlx.nn as nn

from ...kernels import Kernels, QuantizedMatrix, embed_rows, linear
from ..base import CausalLM, KernelModule


class PackedLinear(KernelModule):
    """x [..., K] -> [..., O]."""

    def __init__(self, matrix: QuantizedMatrix, bias: mx.array | None = None):
        super().__init__()
        set_matrix(self, matrix)
        if bias is not None:
            self.bias = bias

    @property
    def matrix(self) -> QuantizedMatrix:
        return read_matrix(self)

    def __call__(self, x: mx.array) -> mx.array:
        rows = x.reshape(-1, x.shape[-1])
        return linear(self.kernels, rows, self.matrix, bias=self.get("bias")).reshape(*x.shape[:-1], -1)


class PackedEmbedding(KernelModule):
    def __init__(self, matrix: QuantizedMatrix):
        super().__init__()
        set_matrix(self, matrix)

    @property
    def matrix(self) -> QuantizedMatrix:
        return read_matrix(self)

    def __call__(self, tokens: mx.array) -> mx.array:
        y = self.kernels.run(embed_rows, tokens=tokens.reshape(-1), matrix=self.matrix, dtype=mx.float32)
        return y.reshape(*tokens.shape, -1)

    def as_linear(self, x: mx.array) -> mx.array:
        rows = x.reshape(-1, x.shape[-1])
        return linear(self.kernels, rows, self.matrix).reshape(*x.shape[:-1], -1)


def set_matrix(module: nn.Module, matrix: QuantizedMatrix) -> None:
    module.weight = matrix.weight
    if matrix.scales is not None:
        module.scales, module.biases = matrix.scales, matrix.biases
    module.bits, module.group_size, module.mode = matrix.bits, matrix.group, matrix.mode


def read_matrix(module: nn.Module) -> QuantizedMatrix:
    """The arrays may have been replaced since."""
    parts = module["weight"], module.get("scales"), module.get("biases")
    return QuantizedMatrix(*parts, module.bits, module.group_size, module.mode)


def is_mlx_layer(module: nn.Module) -> bool:
    return type(module) is nn.QuantizedLinear or isinstance(module, nn.QuantizedEmbedding)


def has_packed_layers(model: CausalLM) -> bool:
    """Whether the kernels have something to compute; a model of another library is left as it is."""
    layers = [m for m in model.modules() if is_mlx_layer(m) or isinstance(m, PackedLinear | PackedEmbedding)]
    return bool(layers) and not model.is_adapter


def pack_modules(model: CausalLM, kernels: Kernels) -> int:
    """Replace MLX's quantised layers by these, where the kernels read them; how many of these there are."""
    for parent in model.modules():
        for name, module in parent.children().items():
            if not is_mlx_layer(module) or (matrix := read_matrix(module)).cpu_unsupported(mx.float32):
                continue
            linear = isinstance(module, nn.QuantizedLinear)
            made = PackedLinear(matrix, module.get("bias")) if linear else PackedEmbedding(matrix)
            made.kernels = kernels
            parent[name] = made
    return sum(isinstance(module, PackedLinear | PackedEmbedding) for module in model.modules())
