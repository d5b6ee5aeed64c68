"""What all Gemmas share: norms on both sides of a branch, a scaled embedding, GELU, capped logits, ropes per layer.

Does not know which layers have a window, nor what a layer computes besides: the files of the generations do.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import mlx.core as mx
import mlx.nn as nn

from ..cache.memory import PagedKV, PlainKV, WindowKV
from ..errors import BadCheckpoint, quote
from .base import FusedModule
from .config import SUPPORTED_VALUES, ModelConfig, config_field
from .fused_linear import add_norm_linear, add_rms_norm, fused_linear
from .layers import Attention, Decoder, DecoderLM, GatedMLP
from .rope import RoPE, RopeParams, read_rope

FULL, SLIDING = "full_attention", "sliding_attention"
GELU = ("gelu_pytorch_tanh",)
GEMMA_VALUES = {
    **SUPPORTED_VALUES,
    "hidden_act": GELU,
    "hidden_activation": GELU,
    "use_bidirectional_attention": (False, None),
}


@dataclass(frozen=True, kw_only=True)
class GemmaConfig(ModelConfig):
    derived: ClassVar[frozenset[str]] = ModelConfig.derived | {"sizes", "ropes"}
    supported: ClassVar[Mapping[str, tuple]] = GEMMA_VALUES
    head_dim: int = config_field()
    tie_word_embeddings: bool = True
    final_logit_softcapping: float | None = config_field(high=1e6, default=None)
    sizes: tuple[tuple[int, int], ...] = ()  # key-value heads and numbers in a head, per layer
    ropes: tuple[RopeParams, ...] = ()  # per layer

    @classmethod
    def parse(cls, raw: Mapping[str, Any], supported: Mapping[str, tuple] | None = None) -> Self:
        return super().parse(raw, supported or cls.supported)

    def _complete(self, raw) -> Self:
        super()._complete(raw)
        object.__setattr__(self, "sizes", self.read_sizes(raw))
        object.__setattr__(self, "ropes", tuple(self.layer_rope(raw, i) for i in range(self.num_hidden_layers)))
        return self

    def read_rope(self, raw) -> RopeParams:
        return read_rope(self.rope_keys(raw, FULL), self.head_dim, self.max_position_embeddings)

    def layer_rope(self, raw, i: int) -> RopeParams:
        kind = FULL if self.windows[i] is None else SLIDING
        return read_rope(self.rope_keys(raw, kind), self.sizes[i][1], self.max_position_embeddings)

    def rope_keys(self, raw, kind: str) -> Mapping[str, Any]:
        """What the config says about the rope of such layers, spelled as for a model whose layers turn alike."""
        return raw

    def read_sizes(self, raw) -> tuple[tuple[int, int], ...]:
        return ((self.num_key_value_heads, self.head_dim),) * self.num_hidden_layers

    @property
    def context(self) -> int:
        return min(self.max_position_embeddings, *(r.limit or self.max_position_embeddings for r in self.ropes))


def rope_section(raw, kind: str, old: str) -> dict[str, Any]:
    """`rope_parameters` per kind of layer; theta may stand under its `old` name beside it."""
    sections = raw.get("rope_parameters")
    sections = {} if sections is None else sections
    if not isinstance(sections, Mapping) or not set(sections) <= {FULL, SLIDING}:
        raise BadCheckpoint(
            f"config.json: rope_parameters must hold {FULL} and {SLIDING} and nothing else, found {quote(sections)}"
        )
    section = sections.get(kind)
    if section is not None and not isinstance(section, Mapping):
        raise BadCheckpoint(f"config.json: rope_parameters.{kind} must be an object, not {quote(section)}")
    theta = (section or {}).get("rope_theta", raw.get(old))
    if theta is None:
        raise BadCheckpoint(f"config.json has no {old} (nor rope_parameters.{kind}.rope_theta); it cannot be guessed")
    scaling = raw.get("rope_scaling") if kind == FULL else None  # the older spelling is about full attention only
    return {"rope_theta": theta, "rope_parameters": section, "rope_scaling": scaling}


class GemmaMLP(GatedMLP):
    activation = "gelu"

    def add_and_feed(self, x, *, post, residual, norm):
        """h = residual + post(x), the sum that this branch begins with: (what it makes of h, h)."""
        if "gate_up_proj" not in self:
            h = add_rms_norm(post, x, residual, self.kernels)
            return self(h, norm=norm), h
        around = {"post": post, "residual": residual, "norm": norm, "activation": self.activation, "pair": True}
        y, h = add_norm_linear(self.gate_up_proj, x, self.kernels, **around)
        return fused_linear(self.down_proj, y, self.kernels), h


class GemmaAttention(Attention):
    def __init__(self, c, i, *, softcap=None, qk_norm=False):
        super().__init__(c, qkv_bias=c.attention_bias, o_bias=c.attention_bias, qk_norm=qk_norm)
        self.scale, self.softcap = c.query_pre_attn_scalar**-0.5, softcap
        self.rope = RoPE(c.ropes[i])


class GemmaBlock(FusedModule):
    """A block whose branches are normed on the way in and on the way out."""

    def __init__(self, c, mixer, mlp):
        super().__init__()
        self.self_attn, self.mlp = mixer, mlp
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            self[f"{name}_layernorm"] = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)

    def fuse(self):
        self.pack_norms(self.input_layernorm, into=self.self_attn)
        self.pack_norms(self.post_attention_layernorm, self.pre_feedforward_layernorm, into=self.mlp)

    def run_branches(self, x, memory):
        """Both: what the MLP makes, not normed yet, and the residual that it is to be added to."""
        y = self.self_attn(x, memory, norm=self.input_layernorm)
        return self.feed(y, x)

    def feed(self, y, x):
        """The MLP, on x + what attention made."""
        return self.mlp.add_and_feed(
            y, post=self.post_attention_layernorm, residual=x, norm=self.pre_feedforward_layernorm
        )

    def __call__(self, x, memory):
        y, h = self.run_branches(x, memory)
        return add_rms_norm(self.post_feedforward_layernorm, y, h, self.kernels)


class GemmaDecoder(Decoder):
    def __init__(self, c, blocks):
        super().__init__(c, blocks)
        self.scale = c.hidden_size**0.5


class Gemma(DecoderLM):
    config: GemmaConfig
    Stack = GemmaDecoder
    NEEDS_BF16 = True

    def __init__(self, config):
        super().__init__(config, [self.block(config, i) for i in range(config.num_hidden_layers)])

    def block(self, c, i) -> nn.Module:
        raise NotImplementedError

    @property
    def softcap(self):
        return self.config.final_logit_softcapping

    def cache_specs(self):
        c, codec = self.config, PlainKV(self.dtype)
        return [
            PagedKV(heads, dim, codec) if window is None else WindowKV(heads, dim, codec, window=window)
            for (heads, dim), window in zip(c.sizes, c.windows, strict=True)
        ]


def add_one_to_norms(config: ModelConfig, arrays: dict[str, mx.array]) -> dict[str, mx.array]:
    """Norms of Gemma 2 and 3 are stored as what is added to one. In float32: the sum is rounded once, when placed."""
    for name, array in arrays.items():
        if re.search(r"norm\.weight$", name) and mx.issubdtype(array.dtype, mx.floating):
            arrays[name] = 1 + array.astype(mx.float32)
    return arrays
