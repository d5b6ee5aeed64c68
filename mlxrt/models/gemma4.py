"""Gemma 4, alone (gemma4_text) or as the text part of a multimodal checkpoint (gemma4).

E2B and E4B give every layer an input of its own and let the last layers read keys and values of earlier ones.
26B-A4B has experts beside the dense MLP.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import mlx.core as mx
import mlx.nn as nn

from ..cache.memory import Shared
from ..errors import BadCheckpoint, UnsupportedModel, quote
from ..kernels import LazyQKV, QKVLayout, moe_router
from .base import CausalLM, FusedModule, KernelModule
from .config import check_value, config_field, report
from .fused_linear import (
    add_norm_linear,
    add_rms_norm,
    concat_products,
    embed,
    fused_linear,
    lazy_qkv,
    matrix_of,
    rms_norm,
)
from .gemma import FULL, GEMMA_VALUES, SLIDING, Gemma, GemmaBlock, GemmaConfig, GemmaDecoder, GemmaMLP, rope_section
from .layers import QKV_PARTS, attend, merge_qkv
from .moe import Experts, topk_softmax
from .multimodal import TOWERS, read_text_config, rename_text_tensor
from .rope import RoPE
from .sanitize_moe import stack_experts

OVERRIDES = ("num_key_value_heads", "head_dim")
EVERY = 6  # without layer_types, every sixth layer is full
KEYS_AND_VALUES = re.compile(r"model\.layers\.(\d{1,5})\.self_attn\.(?:k_proj|v_proj|k_norm|v_norm)\..*")


@dataclass(frozen=True, kw_only=True)
class Gemma4Config(GemmaConfig):
    derived: ClassVar[frozenset[str]] = GemmaConfig.derived | {"sources"}
    ignored_keys: ClassVar[frozenset[str]] = frozenset(
        {"global_head_dim", "num_global_key_value_heads", "per_layer_config"}
    )
    # "vision": images see themselves whole; text stays causal.
    supported: ClassVar = {
        **GEMMA_VALUES,
        "use_bidirectional_attention": (None, False, "vision"),
        "expert_intermediate_size": (None,),
    }
    hidden_size_per_layer_input: int | None = config_field(low=0)
    vocab_size_per_layer_input: int = 0
    num_kv_shared_layers: int = config_field(low=0, default=0)
    use_double_wide_mlp: bool = False
    attention_k_eq_v: bool = False
    enable_moe_block: bool = False
    num_experts: int | None = None
    top_k_experts: int | None = None
    moe_intermediate_size: int | None = None
    sources: tuple[int | None, ...] = ()  # whose keys and values a layer reads; None: its own

    def has_experts(self, layer):
        return self.enable_moe_block

    @classmethod
    def parse(cls, raw: Mapping[str, Any], supported: Mapping[str, tuple] | None = None) -> Self:
        types = raw.get("layer_types")
        if isinstance(types, list) and types[-1:] == [SLIDING]:
            report(
                "config.json: the last of layer_types slides; every Gemma 4 ends in full attention, so this one does"
            )
        return super().parse(raw, supported)

    def _complete(self, raw) -> Self:
        super()._complete(raw)
        object.__setattr__(self, "sources", self.find_sources())
        self.check_inputs()
        if self.enable_moe_block:
            self.check_experts()
        return self

    def _windows(self, raw):
        return (*super()._windows(raw)[:-1], None)

    def windows_without_types(self, raw):
        if self.sliding_window is None:
            raise BadCheckpoint("config.json has no sliding_window; gemma4 needs it")
        return tuple(None if (i + 1) % EVERY == 0 else self.sliding_window for i in range(self.num_hidden_layers))

    def rope_keys(self, raw, kind):
        return rope_section(raw, kind, f"rope_parameters.{kind}.rope_theta")

    def read_sizes(self, raw):
        sizes = [(self.num_key_value_heads, self.head_dim)] * self.num_hidden_layers
        for i, given in self.overrides(raw).items():
            heads, dim = (given.get(key, own) for key, own in zip(OVERRIDES, sizes[i], strict=True))
            if self.num_attention_heads % heads:
                raise BadCheckpoint(
                    f"config.json: {self.num_attention_heads} attention heads are no multiple of "
                    f"the {heads} key-value heads of layer {i}"
                )
            sizes[i] = heads, dim
        return tuple(sizes)

    def overrides(self, raw) -> dict[int, dict[str, int]]:
        """What full attention has instead of num_key_value_heads and head_dim, by layer."""
        if "per_layer_config" in raw:
            return read_layers(raw["per_layer_config"], self.num_hidden_layers)
        if raw.get("global_head_dim") is None:
            raise BadCheckpoint("config.json has neither global_head_dim nor per_layer_config; gemma4 needs one")
        own = {"head_dim": check_value("global_head_dim", "int", raw["global_head_dim"])}
        heads = check_value("num_global_key_value_heads", "int | None", raw.get("num_global_key_value_heads"))
        if heads is not None and self.attention_k_eq_v:  # the models with values of their own do not use it
            own["num_key_value_heads"] = heads
        return {i: own for i, window in enumerate(self.windows) if window is None}

    def find_sources(self) -> tuple[int | None, ...]:
        """The last layers read the last one of their kind that has keys and values."""
        n = self.num_hidden_layers
        first = n - self.num_kv_shared_layers
        found: list[int | None] = [None] * n
        for i in range(max(first, 0), n):
            alike = [j for j in range(first) if (self.windows[j] is None) == (self.windows[i] is None)]
            if not alike or self.sizes[alike[-1]] != self.sizes[i]:
                kind = FULL if self.windows[i] is None else SLIDING
                raise BadCheckpoint(
                    f"config.json: num_kv_shared_layers = {self.num_kv_shared_layers}, but no layer before {first} "
                    f"has the keys and values of {kind} that layer {i} would read"
                )
            found[i] = alike[-1]
        return tuple(found)

    def check_inputs(self) -> None:
        if self.hidden_size_per_layer_input and self.vocab_size_per_layer_input < self.vocab_size:
            raise BadCheckpoint(
                f"config.json: vocab_size_per_layer_input = {self.vocab_size_per_layer_input} must cover the "
                f"vocab_size of {self.vocab_size}"
            )

    def check_experts(self) -> None:
        keys = ("num_experts", "top_k_experts", "moe_intermediate_size")
        if self.num_experts is None or self.top_k_experts is None or self.moe_intermediate_size is None:
            raise BadCheckpoint(f"config.json: enable_moe_block needs {', '.join(keys)}; one of them is missing")
        if self.top_k_experts > self.num_experts:
            raise BadCheckpoint(f"config.json: top_k_experts {self.top_k_experts} of {self.num_experts} experts")


def read_layers(given: Any, count: int) -> dict[int, dict[str, int]]:
    """`per_layer_config`: {"2": {"head_dim": 512, ...}, ...}."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(own, Mapping) for own in given.values()):
        raise BadCheckpoint(f"config.json: per_layer_config must be an object of objects, not {quote(given)}")
    layers: dict[int, dict[str, int]] = {}
    for key, own in given.items():
        if not key.isdecimal() or len(key) > 5 or int(key) >= count:
            raise BadCheckpoint(f"config.json: per_layer_config names {quote(key)}, which is none of {count} layers")
        if strange := sorted(set(own) - set(OVERRIDES)):
            raise UnsupportedModel(f"config.json: per_layer_config.{key} sets {quote(strange[0])}; only {OVERRIDES}")
        layers[int(key)] = {name: check_value(f"per_layer_config.{key}.{name}", "int", v) for name, v in own.items()}
    return layers


class Gemma4Attention(FusedModule):
    """Queries, keys and values are normed, so scores need no scale. Some layers have no v_proj, some only q_proj."""

    layout: QKVLayout | None = None  # with the constants a kernel needs

    def __init__(self, c, i):
        super().__init__()
        self.heads, (self.kv_heads, self.head_dim), self.eps = c.num_attention_heads, c.sizes[i], c.rms_norm_eps
        wide, narrow, bias = self.heads * self.head_dim, self.kv_heads * self.head_dim, c.attention_bias
        self.reads = c.sources[i] is not None  # the keys and values of another layer
        self.tied = self.reads or (c.windows[i] is None and c.attention_k_eq_v)  # no v_proj
        self.q_proj = nn.Linear(c.hidden_size, wide, bias=bias)
        self.o_proj = nn.Linear(wide, c.hidden_size, bias=bias)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=self.eps)
        if not self.reads:
            self.k_proj = nn.Linear(c.hidden_size, narrow, bias=bias)
            self.k_norm = nn.RMSNorm(self.head_dim, eps=self.eps)
            if not self.tied:
                self.v_proj = nn.Linear(c.hidden_size, narrow, bias=bias)
        self.rope = RoPE(c.ropes[i])

    def fuse(self):
        merge_qkv(self)
        if self.kernels.gpu is not None or self.kernels.cpu is not None:
            self.layout = replace(self.qkv_layout(), **self.rope.constants())

    def qkv_layout(self) -> QKVLayout:
        norms = (self.q_norm.weight, None if self.reads else self.k_norm.weight, True, self.eps)
        return QKVLayout(self.heads, self.kv_heads, self.head_dim, *norms, tied=self.tied)

    @property
    def input_linear(self) -> nn.Module | None:
        return self.get("q_proj" if self.reads else "qkv_proj")

    def qkv(self, x, norm) -> LazyQKV | mx.array:
        """[N, heads * D]: the queries; the keys, where there are; the values, where they are not the keys."""
        if (merged := self.input_linear) is not None:
            return lazy_qkv(merged, x, self.kernels, norm)
        return concat_products([self[name] for name in QKV_PARTS if name in self], x, self.kernels, norm)

    def __call__(self, x, kv, *, norm):
        layout = self.layout or self.qkv_layout()
        return attend(self.qkv(x, norm), kv, layout, self.rope, self.kernels, scale=1.0, output=self.o_proj)


class Gemma4Block(GemmaBlock):
    def __init__(self, c, i):
        wide = c.use_double_wide_mlp and c.sources[i] is not None
        mlp = GemmaMLP(c.hidden_size, c.intermediate_size * (2 if wide else 1))
        super().__init__(c, Gemma4Attention(c, i), mlp)
        self.layer_scalar = mx.ones((1,))
        if dim := c.hidden_size_per_layer_input:
            self.per_layer_input_gate = nn.Linear(c.hidden_size, dim, bias=False)
            self.per_layer_projection = nn.Linear(dim, c.hidden_size, bias=False)
            self.post_per_layer_input_norm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)

    def fuse(self):
        super().fuse()
        last = self.post_feedforward_layernorm
        if "per_layer_input_gate" in self:
            self.pack_constants(last, self.per_layer_input_gate)
            last = self.post_per_layer_input_norm
        if self.kernels.gpu is not None:
            last.weight, self.layer_scalar = self.kernels.gpu.pack_constants([last.weight, self.layer_scalar])

    def __call__(self, x, memory, own=None):
        """`own` [N, dim] is this layer's input, in the models that have such."""
        (y, h), post = self.run_branches(x, memory), self.post_feedforward_layernorm
        if own is not None:
            around = {"post": post, "residual": h, "activation": "gelu", "times": own}
            gated, h = add_norm_linear(self.per_layer_input_gate, y, self.kernels, **around)
            y, post = fused_linear(self.per_layer_projection, gated, self.kernels), self.post_per_layer_input_norm
        return add_rms_norm(post, y, h, self.kernels, self.layer_scalar)


class Router(KernelModule):
    """Chooses from the residual itself, which it norms for itself. `scale` holds the stored one over sqrt(hidden)."""

    def __init__(self, c):
        super().__init__()
        self.eps, self.k = c.rms_norm_eps, c.top_k_experts
        self.proj = nn.Linear(c.hidden_size, c.num_experts, bias=False)
        self.scale = mx.ones((c.hidden_size,))
        self.per_expert_scale = mx.ones((c.num_experts,))

    def __call__(self, h):
        matrix = matrix_of(self.proj)
        if matrix is not None and (self.kernels.gpu is not None or self.kernels.cpu is not None):
            norm = {"norm": self.scale, "eps": self.eps, "normalise": True, "scales": self.per_expert_scale}
            return self.kernels.run(moe_router, x=h, matrix=matrix, k=self.k, **norm)
        experts, weights = topk_softmax(self.proj(mx.fast.rms_norm(h, self.scale, self.eps)), self.k)
        return experts, weights * self.per_expert_scale[experts]


class Gemma4MoEBlock(Gemma4Block):
    def __init__(self, c, i):
        super().__init__(c, i)
        self.router = Router(c)
        self.experts = Experts(c.num_experts, c.hidden_size, c.moe_intermediate_size, activation="gelu")
        for name in ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2"):
            self[name] = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)

    def feed(self, y, x):
        y, h = super().feed(y, x)
        sparse = self.experts(h, *self.router(h), norm=self.pre_feedforward_layernorm_2)
        y = rms_norm(self.post_feedforward_layernorm_1, y, self.kernels)
        return add_rms_norm(self.post_feedforward_layernorm_2, sparse, y, self.kernels), h


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
        """Each layer's [N, dim]: half from the token itself, half from its embedding."""
        count, n = len(self.layers), len(tokens)
        own = embed(self.embed_tokens_per_layer, tokens, self.kernels, h.dtype, self.dim**0.5).reshape(-1, self.dim)
        seen = fused_linear(self.per_layer_model_projection, h, self.kernels).reshape(-1, self.dim)
        # A layer's rows lie side by side: kernels would have them copied first otherwise.
        groups = count if n > 1 else 1
        both = add_rms_norm(self.per_layer_projection_norm, seen, own, self.kernels, 2**-0.5, groups)
        return [both[i * n : (i + 1) * n] for i in range(count)]

    def __call__(self, tokens, views):
        h = self.embed(tokens)
        inputs = self.inputs(tokens, h) if self.dim else [None] * len(self.layers)
        for layer, view, own in zip(self.layers, views, inputs, strict=True):
            h = layer(h, view, own)
        return h


class Gemma4(Gemma):
    config: Gemma4Config
    Config = Gemma4Config
    Stack = Gemma4Decoder
    IGNORED_TENSORS = (*CausalLM.IGNORED_TENSORS, *TOWERS)

    @classmethod
    def parse(cls, raw):
        return cls.Config.parse(read_text_config(raw) if raw.get("model_type") == "gemma4" else raw)

    def block(self, c, i):
        return Gemma4MoEBlock(c, i) if c.enable_moe_block else Gemma4Block(c, i)

    def cache_specs(self):
        own = super().cache_specs()
        return [spec if j is None else Shared(j) for spec, j in zip(own, self.config.sources, strict=True)]

    @staticmethod
    def rename(key):
        return rename_text_tensor(key).replace(".experts.switch_glu.", ".experts.")  # mlx-lm's name for the stacks

    @staticmethod
    def sanitize(config, arrays):
        """Published checkpoints keep keys and values of layers that read those of others; they are not used."""
        reading = {str(i) for i, j in enumerate(config.sources) if j is not None}
        used = {n: a for n, a in arrays.items() if not ((m := KEYS_AND_VALUES.fullmatch(n)) and m[1] in reading)}
        if not config.enable_moe_block:
            return used
        for name, array in used.items():
            if name.endswith(".router.scale") and mx.issubdtype(array.dtype, mx.floating):
                used[name] = array.astype(mx.float32) * config.hidden_size**-0.5
        return stack_experts(used, config.num_experts)
