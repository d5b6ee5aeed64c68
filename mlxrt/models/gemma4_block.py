"""A block of Gemma 4: attention on normed queries, keys and values, an input of its own, a scalar at the end."""

from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn

from ..kernels import LazyQKV, QKVLayout
from .attention import attend
from .base import Fusible
from .fused_linear import lazy_qkv, plus_normed, product, product_of_sum
from .gemma import GemmaMLP, Sandwich
from .layers import joined
from .rope import RoPE


class Gemma4Attention(Fusible):
    """Queries, keys and values are normed, so scores need no scale. Some layers have no v_proj, some only q_proj."""

    layout: QKVLayout | None = None  # with the constants a kernel needs

    def __init__(self, c, i):
        super().__init__()
        self.heads, (self.kv_heads, self.head_dim), self.eps = c.num_attention_heads, c.sizes[i], c.rms_norm_eps
        wide, narrow, bias = self.heads * self.head_dim, self.kv_heads * self.head_dim, c.attention_bias
        self.reads = c.sources[i] is not None  # the keys and values of another layer
        self.tied = self.reads or (c.windows[i] is None and c.attention_k_eq_v)  # no v_proj
        self.q_proj = nn.Linear(c.hidden_size, wide, bias=bias)
        self.o_proj = nn.Linear(wide, c.hidden_size, bias=bias)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=self.eps)
        if not self.reads:
            self.k_proj = nn.Linear(c.hidden_size, narrow, bias=bias)
            self.k_norm = nn.RMSNorm(self.head_dim, eps=self.eps)
            if not self.tied:
                self.v_proj = nn.Linear(c.hidden_size, narrow, bias=bias)
        self.rope = RoPE(c.ropes[i])

    def fuse(self):
        names = [name for name in ("q_proj", "k_proj", "v_proj") if name in self]
        if len(names) > 1 and (whole := joined([self[name] for name in names])):
            self.qkv_proj = whole
            for name in names:
                del self[name]
        if self.kernels.gpu is not None:
            self.layout = replace(self.qkv_layout(), **self.rope.constants())

    def qkv_layout(self) -> QKVLayout:
        norms = (self.q_norm.weight, None if self.reads else self.k_norm.weight, True, self.eps)
        return QKVLayout(self.heads, self.kv_heads, self.head_dim, *norms, tied=self.tied)

    @property
    def entry(self) -> nn.Module | None:
        return self.get("q_proj" if self.reads else "qkv_proj")

    def qkv(self, x, norm) -> LazyQKV | mx.array:
        """[N, heads * D]: the queries; the keys, where there are; the values, where they are not the keys."""
        if (whole := self.entry) is not None:
            return lazy_qkv(whole, x, self.kernels, norm)
        names = [name for name in ("q_proj", "k_proj", "v_proj") if name in self]
        return mx.concatenate([self[name](norm(x)) for name in names], axis=-1)

    def __call__(self, x, kv, *, norm):
        layout = self.layout or self.qkv_layout()
        y = attend(self.qkv(x, norm), kv, layout, self.rope, self.kernels, scale=1.0)
        return product(self.o_proj, y, self.kernels)


class Gemma4Block(Sandwich):
    def __init__(self, c, i):
        wide = c.use_double_wide_mlp and c.sources[i] is not None
        mlp = GemmaMLP(c.hidden_size, c.intermediate_size * (2 if wide else 1))
        super().__init__(c, Gemma4Attention(c, i), mlp)
        self.layer_scalar = mx.ones((1,))
        if dim := c.hidden_size_per_layer_input:
            self.per_layer_input_gate = nn.Linear(c.hidden_size, dim, bias=False)
            self.per_layer_projection = nn.Linear(dim, c.hidden_size, bias=False)
            self.post_per_layer_input_norm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)

    def fuse(self):
        super().fuse()
        last = self.post_feedforward_layernorm
        if "per_layer_input_gate" in self:
            self.together(last, self.per_layer_input_gate)
            last = self.post_per_layer_input_norm
        if self.kernels.gpu is not None:
            last.weight, self.layer_scalar = self.kernels.gpu.bundle([last.weight, self.layer_scalar])

    def __call__(self, x, memory, own=None):
        """`own` [N, dim] is this layer's input, in the models that have such."""
        (y, h), post = self.branches(x, memory), self.post_feedforward_layernorm
        if own is not None:
            around = {"post": post, "residual": h, "activation": "gelu", "times": own}
            gated, h = product_of_sum(self.per_layer_input_gate, y, self.kernels, **around)
            y, post = product(self.per_layer_projection, gated, self.kernels), self.post_per_layer_input_norm
        return plus_normed(post, y, h, self.kernels, self.layer_scalar)
