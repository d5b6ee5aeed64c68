"""Experts of many tokens, put in order: what they give is what each token's experts give one by one."""

from dataclasses import replace

import mlx.core as mx
import pytest

from mlxrt.kernels import Kernels, make_gpu, moe_down, moe_gate_up
from mlxrt.kernels.testing import sample
from mlxrt.models.moe import GROUPED, Experts

from ..support.metal_sim import Simulator


def layer(kernels, bits, dtype):
    mx.random.seed(3)
    made = Experts(6, 128, 128)
    for name in ("gate_proj", "up_proj", "down_proj"):
        packed = made[name].to_quantized(32, bits)
        for part in ("scales", "biases"):
            packed[part] = packed[part].astype(dtype)
        made[name] = packed
    made.kernels = kernels
    made.fuse()
    return made


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("tokens", [GROUPED - 1, GROUPED, 21])
def test_many_tokens_are_one_by_one(tokens, bits):
    sim, dtype = Simulator(portable=True), mx.bfloat16
    kernels = Kernels("strict", make_gpu("metal", sim.metal_kernel))
    experts = layer(kernels, bits, dtype)
    x = mx.random.normal((tokens, 128)).astype(dtype)
    chosen = mx.random.randint(0, 6, (tokens, 2)).astype(mx.uint32)
    weights, residual = mx.random.uniform(0, 1, (tokens, 2)), mx.random.normal((tokens, 128)).astype(dtype)
    y = experts(x, chosen, weights, residual=residual)
    plain = layer(Kernels("reference"), bits, mx.float32)
    for name in ("gate_up_proj", "down_proj"):
        for part in plain[name]:
            a = experts[name][part]
            plain[name][part] = a if a.dtype == mx.uint32 else a.astype(mx.float32)
    x, residual = x.astype(mx.float32), residual.astype(mx.float32)
    rows = [plain(x[i : i + 1], chosen[i : i + 1], weights[i : i + 1]) for i in range(tokens)]
    expected = residual + mx.concatenate(rows)
    assert y.dtype == dtype
    assert mx.abs(y.astype(mx.float32) - expected).max() < 2e-2 * mx.abs(expected).max()
    assert ("moe_grouped" in kernels.used) == (tokens >= GROUPED)
    assert not sim.errors()


def test_float32_goes_the_other_way():
    sim = Simulator(portable=True)
    kernels = Kernels("strict", make_gpu("metal", sim.metal_kernel))
    experts = layer(kernels, 4, mx.float32)
    x, chosen = mx.random.normal((9, 128)), mx.random.randint(0, 6, (9, 2)).astype(mx.uint32)
    experts(x, chosen, mx.random.uniform(0, 1, (9, 2)))
    assert "moe_grouped" not in kernels.used and "moe_down" in kernels.used


@pytest.mark.parametrize("mode, bits", [("affine", 4), ("dense", 16), ("mxfp4", 4), ("lut", 3)])
def test_a_matrix_alone_is_a_stack_of_one_where_a_kernel_is_disabled(mode, bits):
    mx.random.seed(3)
    stack, none = sample(mode, (1, 24, 64), mx.float32, bits), mx.zeros((5, 1), mx.uint32)
    parts = {name: None if (a := getattr(stack, name)) is None else a[0] for name in ("weight", "scales", "biases")}
    alone, x, weights = replace(stack, **parts), mx.random.normal((5, 64)), mx.random.uniform(0, 1, (5, 1))
    assert mx.array_equal(moe_gate_up.reference(x, none, alone, "silu"), moe_gate_up.reference(x, none, stack, "silu"))
    y, expected = (moe_down.reference(x[:, None], none, weights, m) for m in (alone, stack))
    assert mx.array_equal(y, expected) and mx.allclose(y, weights * alone.multiply(x), atol=1e-4)
