"""Blocks that several families share. A family that needs something else writes it in its own file."""

import mlx.core as mx
import mlx.nn as nn

from .base import CausalLM, Fusible
from .rope import RoPE


def joined(linears: list[nn.Module]) -> nn.Module | None:
    """One matrix whose outputs are those of several, or None where they are stored differently."""
    if not all(type(m) in (nn.Linear, nn.QuantizedLinear) for m in linears):
        return None  # what else there is has more than rows in it
    kinds = {
        (type(m), *(m.bits, m.group_size, m.mode)) if isinstance(m, nn.QuantizedLinear) else (type(m),) for m in linears
    }
    if len(kinds) > 1 or len({tuple(sorted(m)) for m in linears}) > 1:
        return None
    whole = type(linears[0]).__new__(type(linears[0]))
    nn.Module.__init__(whole)
    for name, value in vars(linears[0]).items():  # bits, group_size, mode
        if name not in vars(whole):
            setattr(whole, name, value)
    for name in linears[0]:
        whole[name] = mx.concatenate([m[name] for m in linears])
    return whole


class Attention(Fusible):
    def __init__(self, c, *, qkv_bias=False, o_bias=False, qk_norm=False):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.scale = self.head_dim**-0.5
        self.q_proj = nn.Linear(c.hidden_size, self.heads * self.head_dim, bias=qkv_bias)
        self.k_proj = nn.Linear(c.hidden_size, self.kv_heads * self.head_dim, bias=qkv_bias)
        self.v_proj = nn.Linear(c.hidden_size, self.kv_heads * self.head_dim, bias=qkv_bias)
        self.o_proj = nn.Linear(self.heads * self.head_dim, c.hidden_size, bias=o_bias)
        if qk_norm:
            self.q_norm = nn.RMSNorm(self.head_dim, eps=c.rms_norm_eps)
            self.k_norm = nn.RMSNorm(self.head_dim, eps=c.rms_norm_eps)
        self.rope = RoPE(c.rope)

    def fuse(self):
        if whole := joined([self.q_proj, self.k_proj, self.v_proj]):
            self.qkv_proj = whole
            for name in ("q_proj", "k_proj", "v_proj"):
                del self[name]

    def qkv(self, x):
        """[N, heads, D] each."""
        if "qkv_proj" in self:
            y = self.qkv_proj(x).reshape(x.shape[0], -1, self.head_dim)
            return mx.split(y, [self.heads, self.heads + self.kv_heads], axis=1)
        return (p(x).reshape(x.shape[0], -1, self.head_dim) for p in (self.q_proj, self.k_proj, self.v_proj))

    def __call__(self, x, kv):
        if "qkv_proj" in self and "q_norm" not in self:
            qkv = self.qkv_proj(x).reshape(x.shape[0], -1, self.head_dim)
            qk, v = mx.split(qkv, [self.heads + self.kv_heads], axis=1)
        else:
            q, k, v = self.qkv(x)
            if "q_norm" in self:
                q, k = self.q_norm(q), self.k_norm(k)
            qk = mx.concatenate([q, k], axis=1)
        qk = self.rope(qk, kv.positions)  # all heads turn alike: one call
        q, k = mx.split(qk, [self.heads], axis=1)
        return self.o_proj(kv.attend(q, k, v, scale=self.scale).flatten(1))


class GatedMLP(Fusible):
    activation = staticmethod(nn.silu)

    def __init__(self, dim, hidden, *, bias=False):
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=bias)
        self.up_proj = nn.Linear(dim, hidden, bias=bias)
        self.down_proj = nn.Linear(hidden, dim, bias=bias)

    def fuse(self):
        if whole := joined([self.gate_proj, self.up_proj]):
            self.gate_up_proj = whole
            del self["gate_proj"], self["up_proj"]

    def __call__(self, x):
        if "gate_up_proj" in self:
            gate, up = mx.split(self.gate_up_proj(x), 2, axis=-1)
        else:
            gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(self.activation(gate) * up)


class Block(nn.Module):
    def __init__(self, c, mixer, mlp):
        super().__init__()
        self.self_attn, self.mlp = mixer, mlp
        self.input_layernorm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)

    def __call__(self, x, memory):
        h = x + self.self_attn(self.input_layernorm(x), memory)
        return h + self.mlp(self.post_attention_layernorm(h))


class Decoder(nn.Module):
    """Embedding, blocks, final norm."""

    def __init__(self, c, blocks):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = blocks
        self.norm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)

    def __call__(self, tokens, views):
        h = self.embed_tokens(tokens)
        for layer, view in zip(self.layers, views, strict=True):
            h = layer(h, view)
        return self.norm(h)


class DecoderLM(CausalLM):
    """A decoder with a head, tied or not."""

    Stack: type[Decoder] = Decoder

    def __init__(self, c, blocks):
        super().__init__()
        self.config = c
        self.model = self.Stack(c, blocks)
        if not c.tie_word_embeddings:
            self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)

    def __call__(self, tokens, views):
        return self.model(tokens, views)

    def logits(self, hidden):
        return self.lm_head(hidden) if "lm_head" in self else self.model.embed_tokens.as_linear(hidden)

    @property
    def dtype(self) -> mx.Dtype:
        """What activations, and so keys and values, are computed in."""
        return self.model.norm.weight.dtype
