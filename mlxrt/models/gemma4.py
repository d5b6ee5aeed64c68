"""Gemma 4, alone (gemma4_text) or as the text part of one that sees and hears (gemma4).

E2B and E4B give every layer an input of its own and let the last layers read keys and values of earlier ones.
"""

import re

import mlx.core as mx
import mlx.nn as nn

from ..cache.memory import Shared
from .base import CausalLM
from .fused_linear import embed, plus_normed, product
from .gemma import Gemma, GemmaDecoder
from .gemma4_block import Gemma4Block
from .gemma4_config import Gemma4Config
from .gemma4_moe import Gemma4MoEBlock
from .multimodal import TOWERS, text_name, text_part
from .sanitize_moe import stack_experts

KEYS_AND_VALUES = re.compile(r"model\.layers\.(\d{1,5})\.self_attn\.(?:k_proj|v_proj|k_norm|v_norm)\..*")


class Gemma4Decoder(GemmaDecoder):
    def __init__(self, c, blocks):
        super().__init__(c, blocks)
        self.dim = c.hidden_size_per_layer_input
        if self.dim:
            width = c.num_hidden_layers * self.dim
            self.embed_tokens_per_layer = nn.Embedding(c.vocab_size_per_layer_input, width)
            self.per_layer_model_projection = nn.Linear(c.hidden_size, width, bias=False)
            # It norms the projection over sqrt(hidden_size), which is the projection with so much larger an eps.
            self.per_layer_projection_norm = nn.RMSNorm(self.dim, eps=c.rms_norm_eps * c.hidden_size)

    def inputs(self, tokens, h):
        """[N, layers, dim]: half from the token itself, half from its embedding."""
        own = embed(self.embed_tokens_per_layer, tokens, self.kernels, h.dtype, self.dim**0.5).reshape(-1, self.dim)
        seen = product(self.per_layer_model_projection, h, self.kernels).reshape(-1, self.dim)
        both = plus_normed(self.per_layer_projection_norm, seen, own, self.kernels, 2**-0.5)
        return both.reshape(len(tokens), -1, self.dim)

    def __call__(self, tokens, views):
        h = self.embed(tokens)
        inputs = self.inputs(tokens, h) if self.dim else None
        for i, (layer, view) in enumerate(zip(self.layers, views, strict=True)):
            h = layer(h, view, None if inputs is None else inputs[:, i])
        return h


class Gemma4(Gemma):
    config: Gemma4Config
    Config = Gemma4Config
    Stack = Gemma4Decoder
    DROPS = (*CausalLM.DROPS, *TOWERS)

    @classmethod
    def parse(cls, raw):
        return cls.Config.parse(text_part(raw) if raw.get("model_type") == "gemma4" else raw)

    def block(self, c, i):
        return Gemma4MoEBlock(c, i) if c.enable_moe_block else Gemma4Block(c, i)

    def cache_specs(self):
        own = super().cache_specs()
        return [spec if j is None else Shared(j) for spec, j in zip(own, self.config.sources, strict=True)]

    @staticmethod
    def rename(key):
        return text_name(key).replace(".experts.switch_glu.", ".experts.")  # mlx-lm's name for the stacks

    @classmethod
    def arrange(cls, config, arrays):
        """Published checkpoints keep keys and values of layers that read those of others; they are not used."""
        reading = {str(i) for i, j in enumerate(config.sources) if j is not None}
        used = {n: a for n, a in arrays.items() if not ((m := KEYS_AND_VALUES.fullmatch(n)) and m[1] in reading)}
        if not config.enable_moe_block:
            return used
        for name, array in used.items():
            if name.endswith(".router.scale") and mx.issubdtype(array.dtype, mx.floating):
                used[name] = array.astype(mx.float32) * config.hidden_size**-0.5
        return stack_experts(used, config.num_experts)
