"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, and windows on the later layers when switched on."""

from dataclasses import dataclass

from ..errors import BadCheckpoint
from .config import ModelConfig
from .layers import Attention
from .llama import Llama


@dataclass(frozen=True)
class QwenConfig(ModelConfig):
    def windows_without_types(self, raw):
        n = self.num_hidden_layers
        if not self.use_sliding_window or self.sliding_window is None:
            return (None,) * n
        first = raw.get("max_window_layers")
        if not isinstance(first, int) or isinstance(first, bool):
            raise BadCheckpoint("config.json: use_sliding_window needs max_window_layers")
        return tuple(self.sliding_window if i >= first else None for i in range(n))


class Qwen2(Llama):
    Config = QwenConfig

    def attention(self, c, i):
        return Attention(c, qkv_bias=True)
