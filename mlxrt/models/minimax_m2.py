"""MiniMax M2: norms over all heads of q and k at once, rope on a part of each head, experts chosen by sigmoid."""

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx
import mlx.nn as nn

from ..errors import UnsupportedModel, quote
from ..kernels import concat_columns
from ..kernels.ops.qmv import MAX_QMV_ROWS
from .base import KernelModule
from .config import SUPPORTED_VALUES
from .fused_linear import fused_linear, rms_norm
from .layers import Attention, Block
from .llama import Llama
from .moe import ROUTING_KEYS, Experts, MoEConfig, can_route, sigmoid_topk
from .rope import read_rope
from .sanitize_moe import rename_experts, sanitize_experts

# What the published configs switch on (or off): other values are another architecture.
SWITCHES = {
    "use_qk_norm": (True,),
    "qk_norm_type": ("per_layer",),
    "use_routing_bias": (True,),
    "scoring_func": ("sigmoid",),
    "shared_intermediate_size": (0, None),
    "layernorm_full_attention_beta": (1,),
    "layernorm_mlp_beta": (1,),
}
UNUSED = {"mlp_intermediate_size", "shared_moe_mode", "max_model_len", "layernorm_linear_attention_beta"}
DRAFTS = {"use_mtp", "num_mtp_modules", "mtp_transformer_layers"}


@dataclass(frozen=True)
class MiniMaxM2Config(MoEConfig):
    ignored_keys: ClassVar[frozenset[str]] = (
        ROUTING_KEYS | UNUSED | DRAFTS | {"rotary_dim", "partial_rotary_factor", "attn_type_list"}
    )

    @classmethod
    def parse(cls, raw, supported=SUPPORTED_VALUES):
        supported = {key: values for key, values in supported.items() if key != "partial_rotary_factor"} | SWITCHES
        kinds = raw.get("attn_type_list")
        if kinds is not None and (not isinstance(kinds, list) or any(kind != 1 for kind in kinds)):
            raise UnsupportedModel(
                f"config.json: attn_type_list = {quote(kinds)}: only 1, full attention, is in this family"
            )
        return super().parse(raw, supported)

    def read_rope(self, raw):
        return read_rope(raw, self.head_dim, self.max_position_embeddings, partial=True)


class WideNormAttention(Attention):
    """Norms of queries and keys span all heads, so they come between the products and attention."""

    def __init__(self, c):
        super().__init__(c)
        self.q_norm = nn.RMSNorm(self.heads * self.head_dim, eps=c.rms_norm_eps)
        self.k_norm = nn.RMSNorm(self.kv_heads * self.head_dim, eps=c.rms_norm_eps)

    def merge_projections(self):
        """None: queries and keys are rows of their own, which kernels norm."""

    def qkv(self, x, norm=None):
        if norm is not None and x.shape[0] > MAX_QMV_ROWS:
            x, norm = rms_norm(norm, x, self.kernels), None  # once for all of them
        q, k, v = (fused_linear(self[name], x, self.kernels, norm=norm) for name in ("q_proj", "k_proj", "v_proj"))
        q, k = rms_norm(self.q_norm, q, self.kernels), rms_norm(self.k_norm, k, self.kernels)
        return self.kernels.run(concat_columns, a=q, b=k, c=v)


class MiniMaxMoE(KernelModule):
    """Routing is float32: the correction bias is large against the differences it decides."""

    def __init__(self, c):
        super().__init__()
        self.top_k = c.num_experts_per_tok
        self.gate = nn.Linear(c.hidden_size, c.num_experts, bias=False)
        self.e_score_correction_bias = mx.zeros((c.num_experts,))
        self.experts = Experts(c.num_experts, c.hidden_size, c.intermediate_size)

    @property
    def input_linear(self) -> nn.Module:
        return self.gate

    def __call__(self, x, *, norm=None, residual=None):
        correction = self.e_score_correction_bias
        if can_route(self.kernels, self.gate, x):
            rules = {"sigmoid": True, "correction": correction, "normalise": True}
            return self.experts.route_and_run(x, self.gate, self.top_k, norm=norm, residual=residual, **rules)
        h = x if norm is None else norm(x)
        chosen = sigmoid_topk(self.gate(h.astype(mx.float32)), correction, self.top_k, normalise=True)
        return self.experts(h, *chosen, residual=residual)


class MiniMaxM2(Llama):
    Config = MiniMaxM2Config
    IGNORED_TENSORS = (*Llama.IGNORED_TENSORS, (r"(^|\.)mtp(_modules?)?\.", "multi-token prediction is not used"))
    KEEP_FP32 = (r"\.mlp\.gate\.", r"\.e_score_correction_bias$")
    rename, sanitize = staticmethod(rename_experts), staticmethod(sanitize_experts)

    def block(self, c, i):
        return Block(c, WideNormAttention(c), MiniMaxMoE(c))
