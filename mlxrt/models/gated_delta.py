"""Gated delta net: linear attention whose memory is one matrix per head, corrected towards v wherever k points.

Holds the layer and the rule for many tokens at once by plain MLX; kernels/ops/gated_delta.py has the step,
gated_delta_prefill.py the kernels for many tokens. Knows nothing of families or caches: it hands `memory.scan` a cell
and says with `spec` what the cell remembers.
"""

import mlx.core as mx
import mlx.nn as nn

from ..cache.memory import Recurrent
from ..kernels import gated_delta_prefill, gated_delta_step
from ..kernels.mlx_defects import cumsum
from ..kernels.ops.gated_delta import gated_delta_layer, split_projection
from .base import FusedModule
from .fused_linear import concat_products, fused_linear
from .layers import merge_linears

CHUNK = 64  # tokens whose corrections are solved for at once, and tokens between two checkpoints


class DepthwiseConv(nn.Module):
    """Weights of a causal convolution of every channel with itself."""

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.weight = mx.random.uniform(-0.5, 0.5, (channels, width))


class GatedDeltaNet(FusedModule):
    def __init__(self, c):
        super().__init__()
        self.value_heads = c.linear_num_value_heads
        self.key_dim, self.value_dim = c.linear_key_head_dim, c.linear_value_head_dim
        keys, values = c.linear_num_key_heads * self.key_dim, self.value_heads * self.value_dim
        self.widths = (2 * keys + values, values, self.value_heads, self.value_heads)
        for name, width in zip(PROJECTIONS, self.widths):
            self[name] = nn.Linear(c.hidden_size, width, bias=False)
        self.conv1d = DepthwiseConv(2 * keys + values, c.linear_conv_kernel_dim)
        self.A_log = mx.zeros(self.value_heads)
        self.dt_bias = mx.ones(self.value_heads)
        self.norm = nn.RMSNorm(self.value_dim, eps=c.rms_norm_eps)
        self.out_proj = nn.Linear(values, c.hidden_size, bias=False)

    def fuse(self):
        merge_linears(self, PROJECTIONS, "in_proj")
        self.pack_constants(self, self.conv1d, self.norm)  # what one step reads besides the token and the memory

    @property
    def input_linear(self) -> nn.Module | None:
        return self.get("in_proj")

    def project(self, x, norm=None):
        """[N, sum of widths]: q, k and v side by side; the gate z; b and a, one number a head."""
        if "in_proj" in self:
            return fused_linear(self.in_proj, x, self.kernels, norm=norm)
        return concat_products([self[name] for name in PROJECTIONS], x, self.kernels, norm)

    def spec(self, dtype: mx.Dtype) -> Recurrent:
        past = (self.conv1d.weight.shape[1] - 1, self.widths[0])
        state = (self.value_heads, self.key_dim, self.value_dim)
        return Recurrent(((past, dtype), (state, mx.float32)), stride=CHUNK)

    def __call__(self, x, memory, *, norm=None, residual=None):
        projected = self.project(x, norm)
        if (y := self.prefill(projected, memory)) is None:
            y = memory.scan(self.cell, projected)
        return fused_linear(self.out_proj, y, self.kernels, residual=residual)

    def prefill(self, projected, memory):
        """All rows of a prefill step at once; None where kernels cannot, and in a decode step."""
        if self.kernels.gpu is None or (rows := memory.packed_rows()) is None:
            return None
        given = {"projected": projected, "rows": rows} | self.arguments(memory.live)
        if not self.kernels.accepts(gated_delta_prefill, **given):
            return None
        y, *states = self.kernels.run(gated_delta_prefill, **given)
        memory.write_rows(states)
        return y

    def arguments(self, parts):
        """What the ops take beside the token: the memory and the layer's constants."""
        weights = {"conv_weight": self.conv1d.weight, "a_log": self.A_log, "dt_bias": self.dt_bias}
        return dict(zip(("conv_state", "state"), parts), **weights, norm=self.norm.weight, eps=self.norm.eps)

    def cell(self, parts, projected):
        """parts: inputs of the convolution, state [B, Hv, Dk, Dv]; projected [B, L, sum of widths]."""
        given = self.arguments(parts)
        if projected.shape[1] > 1:
            y, *kept = gated_delta_layer(scan_chunks, **split_projection(projected, given["state"]), **given)
            return tuple(kept), y
        y, *kept = self.kernels.run(gated_delta_step, projected=projected[:, 0], **given)
        return tuple(kept), y[:, None]


PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")


def scan_chunks(state, q, k, v, g, beta, size: int = CHUNK):
    """The rule for many tokens, `size` at once: within a chunk every correction depends on those before it by a
    triangular system, whose inverse does not depend on the state. So only the state itself goes from chunk to chunk.
    """
    length = q.shape[-2]
    size = min(size, 1 << (length - 1).bit_length())
    q, k, v, g, beta = (split_chunks(x, size) for x in (q, k, v, g, beta))
    fade = compute_decay(g)  # [..., n, size, size]
    faded = mx.exp(cumsum(g, axis=-2))
    kt = k.swapaxes(-1, -2)
    inverse = unit_lower_inverse(beta * (k @ kt) * mx.tril(fade, -1))
    u, w = inverse @ (beta * v), inverse @ (beta * faded * k)
    within, read = (q @ kt) * fade, q * faded
    write = (k * fade[..., -1, :, None]).swapaxes(-1, -2)
    ys = []
    for u_i, w_i, read_i, within_i, write_i, left in iterate_chunks(u, w, read, within, write, faded[..., -1:, :]):
        new = u_i - w_i @ state
        ys.append(read_i @ state + within_i @ new)
        state = left * state + write_i @ new
    return state, mx.concatenate(ys, axis=-2)[..., :length, :]


def split_chunks(x, size: int):
    """[..., L, D] -> [..., n, size, D]; zeros at the end, which as k, beta and g leave the state alone."""
    missing = -x.shape[-2] % size
    if missing:
        x = mx.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, missing), (0, 0)])
    return x.reshape(*x.shape[:-2], -1, size, x.shape[-1])


def iterate_chunks(*arrays):
    """The arrays of one chunk after another."""
    return zip(*(mx.moveaxis(x, -3, 0) for x in arrays), strict=True)


def compute_decay(g):
    """How much of token j is left at token i, [..., L, L] from logs [..., L, 1]; 0 where j comes after i.

    Sums over just the tokens between: the difference of two running sums would lose small decays beside large ones.
    """
    size = g.shape[-2]
    between = mx.where(mx.tri(size, k=-1, dtype=mx.bool_), g, 0.0)
    return mx.tril(mx.exp(cumsum(between, axis=-2)))


def unit_lower_inverse(a):
    """(1 + a)^-1 for strictly lower triangular a [..., L, L], L a power of two, by doubling the blocks that are known.

    A power series in a would need fewer products, but its terms grow beyond float32 when keys repeat.
    """
    *batch, length, _ = a.shape
    known, size = mx.ones((*batch, length, 1, 1), a.dtype), 1
    while size < length:
        n = length // (2 * size)
        corner = a.reshape(*batch, n, 2, size, n, 2, size)[..., 1, :, :, 0, :]  # [..., n, size, n, size]
        corner = mx.moveaxis(mx.diagonal(corner, axis1=-4, axis2=-2), -1, -3)  # [..., n, size, size]
        upper, lower = known[..., ::2, :, :], known[..., 1::2, :, :]
        top = mx.concatenate([upper, mx.zeros_like(upper)], axis=-1)
        known = mx.concatenate([top, mx.concatenate([-(lower @ corner @ upper), lower], axis=-1)], axis=-2)
        size *= 2
    return known[..., 0, :, :]
