"""Qwen3-MoE (30B-A3B, 235B-A22B, Coder): Qwen3 attention, experts in all but the layers the config excepts."""

from dataclasses import dataclass, field

from ..errors import BadCheckpoint
from .layers import Attention, Block, GatedMLP
from .llama import Llama
from .moe import MoEConfig, SparseMoE, is_sparse
from .sanitize_moe import rename_experts, sanitize_experts


@dataclass(frozen=True)
class Qwen3MoEConfig(MoEConfig):
    moe_intermediate_size: int = field(kw_only=True)
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] | None = None

    def windows_without_types(self, raw):
        if not self.use_sliding_window:
            return (None,) * self.num_hidden_layers
        if self.sliding_window is None:
            raise BadCheckpoint("config.json: use_sliding_window is true but sliding_window is missing")
        return (self.sliding_window,) * self.num_hidden_layers  # max_window_layers plays no part in this family

    def has_experts(self, layer):
        return is_sparse(layer, self.decoder_sparse_step, self.mlp_only_layers)


class Qwen3MoE(Llama):
    Config = Qwen3MoEConfig
    rename, sanitize = staticmethod(rename_experts), staticmethod(sanitize_experts)

    def attention(self, c, i):
        return Attention(c, qkv_bias=c.attention_bias, o_bias=c.attention_bias, qk_norm=True)

    def block(self, c, i):
        if not c.has_experts(i):
            return Block(c, self.attention(c, i), GatedMLP(c.hidden_size, c.intermediate_size))
        mlp = SparseMoE(
            c.num_experts, c.hidden_size, c.moe_intermediate_size, c.num_experts_per_tok, normalise=c.norm_topk_prob
        )
        return Block(c, self.attention(c, i), mlp)
