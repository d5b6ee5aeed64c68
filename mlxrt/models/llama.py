"""Llama 2 and 3, SmolLM2, and whatever else calls itself `llama`."""

from ..cache.memory import PagedKV, PlainKV, WindowKV
from .layers import Attention, Block, DecoderLM, GatedMLP


class Llama(DecoderLM):
    def __init__(self, config):
        super().__init__(config, [self.block(config, i) for i in range(config.num_hidden_layers)])

    def block(self, c, i):
        return Block(c, self.attention(c, i), GatedMLP(c.hidden_size, c.intermediate_size, bias=c.mlp_bias))

    def attention(self, c, i):
        return Attention(c, qkv_bias=c.attention_bias, o_bias=c.attention_bias)

    def cache_specs(self):
        c, codec = self.config, PlainKV(self.dtype)
        full = PagedKV(c.num_key_value_heads, c.head_dim, codec)
        return [full if w is None else WindowKV(c.num_key_value_heads, c.head_dim, codec, window=w) for w in c.windows]
