"""Qwen3-Next: gated delta nets with a gated attention among them, experts beside one that every token uses.

Qwen3.5 is made of the same parts (qwen3_5.py). Norms here hold their gain itself; checkpoints hold it less one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import mlx.core as mx
import mlx.nn as nn

from ..cache.memory import PagedKV, PlainKV
from ..errors import BadCheckpoint, UnsupportedModel, quote
from ..kernels import compute_qkv
from .base import CausalLM
from .config import SUPPORTED_VALUES, ModelConfig, config_field
from .fused_linear import fused_linear
from .gated_delta import GatedDeltaNet
from .layers import Attention, Block, DecoderLM, GatedMLP, take_rows
from .moe import MoEConfig, SharedExpertMoE, is_sparse
from .rope import read_rope
from .sanitize_hybrid import sanitize_hybrid
from .sanitize_moe import rename_experts, sanitize_experts

LINEAR, FULL = "linear_attention", "full_attention"


@dataclass(frozen=True, kw_only=True)
class HybridConfig(ModelConfig):
    """What Qwen3-Next and Qwen3.5 share."""

    derived: ClassVar[frozenset[str]] = ModelConfig.derived | {"by_jang"}
    ignored_keys: ClassVar[frozenset[str]] = frozenset({"partial_rotary_factor", "rotary_dim"})
    supported: ClassVar[Mapping[str, tuple]] = {
        k: v for k, v in SUPPORTED_VALUES.items() if k != "partial_rotary_factor"
    } | {"attn_output_gate": (True,), "use_sliding_window": (False, None), "mlp_bias": (False, None)}
    linear_conv_kernel_dim: int = config_field(low=2, high=1 << 10)
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    full_attention_interval: int = 4  # as transformers has it; says nothing where layer_types is given
    jang_norms_pre_shifted: bool | None = None  # JANG's stamp: norms have their 1
    by_jang: bool = False  # written by JANG, which leaves norms as they were or adds the 1

    @classmethod
    def parse(cls, raw: Mapping[str, Any], supported: Mapping[str, tuple] | None = None) -> Self:
        return super().parse(raw, supported or cls.supported)

    def _complete(self, raw):
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise BadCheckpoint(
                f"config.json: linear_num_value_heads {self.linear_num_value_heads} is no multiple of "
                f"linear_num_key_heads {self.linear_num_key_heads}"
            )
        object.__setattr__(self, "layer_types", self._read_layer_types())
        object.__setattr__(self, "by_jang", "jang_config" in raw or "jang" in raw)
        return super()._complete(raw)

    def _read_layer_types(self) -> tuple[str, ...]:
        n, every = self.num_hidden_layers, self.full_attention_interval
        if self.layer_types is None:
            return tuple(LINEAR if (i + 1) % every else FULL for i in range(n))
        if len(self.layer_types) != n:
            raise BadCheckpoint(f"config.json: {len(self.layer_types)} layer_types for {n} layers")
        if other := [kind for kind in self.layer_types if kind not in (LINEAR, FULL)]:
            raise UnsupportedModel(f"config.json: layer_types holds {quote(other[0])}, which this family does not have")
        return self.layer_types

    def _windows(self, raw):
        return (None,) * self.num_hidden_layers

    def read_rope(self, raw):
        sections = [p for p in (raw, raw.get("rope_parameters"), raw.get("rope_scaling")) if isinstance(p, Mapping)]
        if "rotary_dim" not in raw and not any("partial_rotary_factor" in section for section in sections):
            raw = {**raw, "partial_rotary_factor": 0.25}  # transformers' default for both families
        return read_rope(raw, self.head_dim, self.max_position_embeddings, partial=True)


@dataclass(frozen=True, kw_only=True)
class SparseConfig(HybridConfig, MoEConfig):
    """With experts."""

    ignored_keys: ClassVar[frozenset[str]] = HybridConfig.ignored_keys | MoEConfig.ignored_keys
    intermediate_size: int = 0  # of the layers without experts: needed where there are some
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    norm_topk_prob: bool = True
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] | None = None

    def has_experts(self, layer):
        return is_sparse(layer, self.decoder_sparse_step, self.mlp_only_layers)


class GatedAttention(Attention):
    """Every query head brings a gate for what it reads."""

    def __init__(self, c):
        super().__init__(c, qkv_bias=c.attention_bias, o_bias=c.attention_bias, qk_norm=True)
        self.q_proj = nn.Linear(c.hidden_size, 2 * self.heads * self.head_dim, bias=c.attention_bias)

    def fuse(self):
        """Queries and gates, which take turns head by head, become matrices of their own where the format allows it."""
        rows = mx.arange(2 * self.heads * self.head_dim).reshape(self.heads, 2, self.head_dim)
        gate, query = (take_rows(self.q_proj, rows[:, i].flatten()) for i in (1, 0))
        if gate is not None and query is not None:
            self["gate_proj"], self["q_proj"] = gate, query
        super().fuse()

    def __call__(self, x, kv, *, norm=None, residual=None):
        y = self.read_gated(x, kv, norm) if "gate_proj" in self else self.read_interleaved(x, kv, norm)
        return fused_linear(self.o_proj, y, self.kernels, residual=residual)

    def read_gated(self, x, kv, norm):
        y = self.attend(self.qkv(x, norm), kv)
        return fused_linear(self.gate_proj, x, self.kernels, norm=norm, activation="sigmoid", times=y)

    def read_interleaved(self, x, kv, norm):
        qkv = compute_qkv(self.qkv(x, norm), self.kernels).reshape(x.shape[0], -1, self.head_dim)
        both, rest = mx.split(qkv, [2 * self.heads], axis=1)  # queries and gates interleaved; keys and values
        qkv = mx.concatenate([both[:, ::2], rest], axis=1).flatten(1)
        return self.attend(qkv, kv) * mx.sigmoid(both[:, 1::2].flatten(1))


class Hybrid(DecoderLM):
    """The families' common frame, dense."""

    IGNORED_TENSORS = (*CausalLM.IGNORED_TENSORS, (r"^(language_model\.)?mtp\.", "multi-token prediction is not used"))

    sanitize = staticmethod(sanitize_hybrid)

    def __init__(self, config):
        super().__init__(config, [self.block(config, i, kind) for i, kind in enumerate(config.layer_types)])

    def block(self, c, i, kind):
        mixer, name = (GatedDeltaNet(c), "linear_attn") if kind == LINEAR else (GatedAttention(c), "self_attn")
        return Block(c, mixer, self.mlp(c, i), name)

    def mlp(self, c, i):
        return GatedMLP(c.hidden_size, c.intermediate_size)

    def cache_specs(self):
        c = self.config
        full = PagedKV(c.num_key_value_heads, c.head_dim, PlainKV(self.dtype))
        return [b.linear_attn.spec(self.dtype) if "linear_attn" in b else full for b in self.model.layers]


class Qwen3Next(Hybrid):
    Config = SparseConfig
    rename = staticmethod(rename_experts)

    def mlp(self, c, i):
        return SharedExpertMoE(c) if c.has_experts(i) else super().mlp(c, i)

    @staticmethod
    def sanitize(config, arrays):
        return sanitize_experts(config, sanitize_hybrid(config, arrays))
