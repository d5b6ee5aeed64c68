"""Qwen3 dense: Qwen2 with norms on q and k instead of biases."""

from .layers import Attention
from .llama import Llama
from .qwen2 import QwenConfig


class Qwen3(Llama):
    Config = QwenConfig

    def attention(self, c, i):
        return Attention(c, qkv_bias=c.attention_bias, o_bias=c.attention_bias, qk_norm=True)
