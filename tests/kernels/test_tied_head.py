"""A tied head is a product for any number of rows, also where an embedding's own call would look rows up."""

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlxrt.models.fused_linear import plain_linear


@pytest.mark.parametrize("packed", [False, True])
def test_many_rows_through_a_tied_head(packed):
    mx.random.seed(0)
    table = nn.Embedding(96, 64)
    plain = table.weight
    if packed:
        table = table.to_quantized(32, 8)
        plain = mx.dequantize(table.weight, table.scales, table.biases, 32, 8)
    x = mx.random.normal((70, 64))
    assert mx.allclose(plain_linear(table, x, dequantize=True), x @ plain.T, atol=1e-4)
