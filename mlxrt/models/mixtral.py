"""Mixtral: Mistral whose every MLP is a mixture of experts."""

from dataclasses import dataclass

from .layers import Block
from .llama import Llama
from .moe import MoEConfig, SparseMoE
from .sanitize_moe import rename_experts, sanitize_experts


@dataclass(frozen=True)
class MixtralConfig(MoEConfig):
    def windows_without_types(self, raw):
        return (self.sliding_window,) * self.num_hidden_layers


class Mixtral(Llama):
    Config = MixtralConfig
    rename, sanitize = staticmethod(rename_experts), staticmethod(sanitize_experts)

    def block(self, c, i):
        mlp = SparseMoE(c.num_experts, c.hidden_size, c.intermediate_size, c.num_experts_per_tok, normalise=True)
        return Block(c, self.attention(c, i), mlp)
