"""A block of Gemma 4: attention on normed queries, keys and values, an input of its own, a scalar at the end."""

import mlx.core as mx
import mlx.nn as nn

from .base import Fusible
from .gemma import GemmaMLP, Sandwich
from .layers import joined
from .rope import RoPE


class Gemma4Attention(Fusible):
    """Queries, keys and values are normed, so scores need no scale. Some layers have no v_proj, some only q_proj."""

    def __init__(self, c, i):
        super().__init__()
        self.heads, (self.kv_heads, self.head_dim), self.eps = c.num_attention_heads, c.sizes[i], c.rms_norm_eps
        wide, narrow, bias = self.heads * self.head_dim, self.kv_heads * self.head_dim, c.attention_bias
        self.reads = c.sources[i] is not None
        self.q_proj = nn.Linear(c.hidden_size, wide, bias=bias)
        self.o_proj = nn.Linear(wide, c.hidden_size, bias=bias)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=self.eps)
        if not self.reads:
            self.k_proj = nn.Linear(c.hidden_size, narrow, bias=bias)
            self.k_norm = nn.RMSNorm(self.head_dim, eps=self.eps)
            if c.windows[i] is not None or not c.attention_k_eq_v:
                self.v_proj = nn.Linear(c.hidden_size, narrow, bias=bias)
        self.rope = RoPE(c.ropes[i])

    def fuse(self):
        names = [name for name in ("q_proj", "k_proj", "v_proj") if name in self]
        if len(names) > 1 and (whole := joined([self[name] for name in names])):
            self.qkv_proj = whole
            for name in names:
                del self[name]

    def qkv(self, x):
        """[N, heads, D] each; k twice where there is no v."""
        if "qkv_proj" in self:
            y = self.qkv_proj(x).reshape(x.shape[0], -1, self.head_dim)
            q, k, *v = mx.split(y, [self.heads, *range(self.heads + self.kv_heads, y.shape[1], self.kv_heads)], axis=1)
            return q, k, *(v or [k])
        names = ("q_proj", "k_proj", "v_proj" if "v_proj" in self else "k_proj")
        return [self[name](x).reshape(x.shape[0], -1, self.head_dim) for name in names]

    def __call__(self, x, kv):
        if self.reads:
            q = self.q_proj(x).reshape(x.shape[0], -1, self.head_dim)
            out = kv.attend(self.rope(self.q_norm(q), kv.positions), scale=1.0)
        else:
            q, k, v = self.qkv(x)
            q, k = self.rope(self.q_norm(q), kv.positions), self.rope(self.k_norm(k), kv.positions)
            out = kv.attend(q, k, mx.fast.rms_norm(v, None, self.eps), scale=1.0)
        return self.o_proj(out.flatten(1))


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

    def __call__(self, x, memory, own=None):
        """`own` [N, dim] is this layer's input, in the models that have such."""
        h = self.feed(self.attend(x, memory))
        if own is not None:
            gated = nn.gelu_approx(self.per_layer_input_gate(h)) * own
            h = h + self.post_per_layer_input_norm(self.per_layer_projection(gated))
        return h * self.layer_scalar
