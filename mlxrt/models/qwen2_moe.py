"""Qwen1.5-MoE and Qwen2-57B-A14B: Qwen2's attention, experts beside one that every token uses."""

from dataclasses import dataclass

from .layers import Attention, Block, GatedMLP
from .llama import Llama
from .moe import MoEConfig, SharedExpertMoE, is_sparse
from .qwen2 import QwenConfig
from .sanitize_moe import rename_experts, sanitize_experts


@dataclass(frozen=True, kw_only=True)
class Qwen2MoEConfig(MoEConfig, QwenConfig):
    intermediate_size: int = 0  # of the layers without experts: needed where there are some
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] | None = None
    qkv_bias: bool = True

    def has_experts(self, layer):
        return is_sparse(layer, self.decoder_sparse_step, self.mlp_only_layers)


class Qwen2MoE(Llama):
    Config = Qwen2MoEConfig
    rename, sanitize = staticmethod(rename_experts), staticmethod(sanitize_experts)

    def block(self, c, i):
        mlp = SharedExpertMoE(c) if c.has_experts(i) else GatedMLP(c.hidden_size, c.intermediate_size)
        return Block(c, Attention(c, qkv_bias=c.qkv_bias), mlp)
