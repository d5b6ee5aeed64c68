"""The gated delta rule against its definition, token by token in float64; the layer however a text is cut."""

from itertools import pairwise
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

from mlxrt.kernels.ops.gated_delta import delta_rule, l2_normalize
from mlxrt.models.gated_delta import GatedDeltaNet, scan_chunks, unit_lower_inverse

SHAPE = {
    "hidden_size": 24,
    "rms_norm_eps": 1e-6,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}


def inputs(length, *, steady=False, decay=1.0):
    """State, q, k, v, g, beta. `steady`: one key over and over, written in full, nothing forgotten."""
    mx.random.seed(length)
    state = mx.random.normal((2, 2, 3, 16, 8))
    q, k = (l2_normalize(mx.random.normal((2, 2, 1, length, 16))) for _ in range(2))
    v = mx.random.normal((2, 2, 3, length, 8))
    g, beta = (mx.random.normal((2, 2, 3, length, 1)) for _ in range(2))
    if steady:
        return state, q, mx.broadcast_to(k[..., :1, :], k.shape), v, mx.zeros_like(g), mx.ones_like(beta)
    return state, q, k, v, -mx.exp(3 * g - 3) * decay, mx.sigmoid(3 * beta)


def truth(state, q, k, v, g, beta):
    state, q, k, v, g, beta = (np.array(x).astype(np.float64) for x in (state, q, k, v, g, beta))
    q, k = (np.repeat(x, v.shape[2], axis=2) for x in (q, k))
    ys = []
    for t in range(q.shape[-2]):
        state = state * np.exp(g[..., t, :, None])
        read = np.einsum("...k,...kv->...v", k[..., t, :], state)
        state = state + k[..., t, :, None] * (beta[..., t, :] * (v[..., t, :] - read))[..., None, :]
        ys.append(np.einsum("...k,...kv->...v", q[..., t, :], state))
    return state, np.stack(ys, axis=-2)


def close(found, wanted, tolerance):
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == mx.float32 and a.shape == b.shape
        assert np.abs(np.array(a) - b).max() < tolerance


@pytest.mark.parametrize("length", [1, 2, 3, 31, 64, 65, 200])
def test_chunks_are_the_rule(length):
    given = inputs(length)
    close(scan_chunks(*given), truth(*given), 5e-6)


def test_step_is_the_rule():
    given = inputs(1)
    close(delta_rule(*given), truth(*given), 5e-6)


@pytest.mark.parametrize("length", [64, 130])
def test_a_key_that_repeats(length):
    """Here a series for the inverse would need terms beyond float32, all of which cancel."""
    given = inputs(length, steady=True)
    close(scan_chunks(*given), truth(*given), 1e-5)


def test_small_decays_beside_large_ones():
    given = list(inputs(64))
    given[4] = mx.where(mx.arange(64)[:, None] % 8 == 0, -500.0, -0.01) + mx.zeros_like(given[4])
    close(scan_chunks(*given), truth(*given), 5e-6)


def test_inverse():
    mx.random.seed(1)
    a = mx.tril(mx.random.normal((3, 32, 32)), -1) * 0.3
    assert np.abs(np.array(unit_lower_inverse(a) @ (a + mx.eye(32))) - np.eye(32)).max() < 1e-4


def layer():
    mx.random.seed(3)
    net = GatedDeltaNet(SimpleNamespace(**SHAPE))
    net.A_log = mx.random.normal((6,))
    return net


def run(net, x, cuts):
    """The layer over one text, its memory carried from cut to cut."""
    spec, kept = net.spec(x.dtype), {}
    kept["parts"] = tuple(mx.zeros((1, *shape), dtype) for shape, dtype in spec.parts)

    def scan(cell, *xs):
        kept["parts"], y = cell(kept["parts"], *(a[None] for a in xs))
        return y[0]

    bounds = [0, *cuts, x.shape[0]]
    ys = [net(x[a:b], SimpleNamespace(scan=scan)) for a, b in pairwise(bounds)]
    return mx.concatenate(ys), kept["parts"]


@pytest.mark.parametrize("cuts", [range(1, 150), (64, 128), (1, 2, 70), (149,), (3, 66, 67)])
def test_however_a_text_is_cut(cuts):
    net, x = layer(), mx.random.normal((150, 24))
    y, parts = run(net, x, ())
    again, kept = run(net, x, cuts)
    assert mx.abs(y - again).max().item() < 1e-5
    assert all(mx.abs(a - b).max().item() < 1e-5 for a, b in zip(parts, kept))


def test_rows_of_a_batch_are_independent():
    net = layer()
    mx.random.seed(9)
    parts = tuple(mx.random.normal((3, *shape)) for shape, _ in net.spec(mx.float32).parts)
    projected = mx.random.normal((3, 1, sum(net.widths)))
    together, y = net.cell(parts, projected)
    for r in range(3):
        alone, mine = net.cell(tuple(p[r : r + 1] for p in parts), projected[r : r + 1])
        assert mx.abs(mine - y[r : r + 1]).max().item() < 1e-6
        assert all(mx.abs(a - b[r : r + 1]).max().item() < 1e-6 for a, b in zip(alone, together))


def test_fused_is_the_same():
    net, x = layer(), mx.random.normal((20, 24))
    y, _ = run(net, x, ())
    net.fuse()
    assert "in_proj" in net and "in_proj_qkv" not in net
    assert mx.abs(run(net, x, ())[0] - y).max().item() < 1e-5


def test_dtypes():
    net = layer()
    net.set_dtype(mx.bfloat16)
    assert [dtype for _, dtype in net.spec(mx.bfloat16).parts] == [mx.bfloat16, mx.float32]
    for length in (1, 20):
        y, (past, state) = run(net, mx.random.normal((length, 24)).astype(mx.bfloat16), ())
        assert (y.dtype, past.dtype, state.dtype) == (mx.bfloat16, mx.bfloat16, mx.float32)
