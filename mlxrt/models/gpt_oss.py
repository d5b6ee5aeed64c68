"""gpt-oss: attention sinks, windows on every other layer, biases everywhere, experts with a clamped SwiGLU."""

import re
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import mlx.core as mx
import mlx.nn as nn

from ..errors import BadCheckpoint, quote
from ..kernels.ops.activation import clamped
from .base import KernelModule
from .config import config_field
from .layers import Attention, Block
from .llama import Llama
from .moe import ROUTING_KEYS, Experts, MoEConfig, can_route, topk_softmax
from .sanitize_moe import put

# What a config without rope_scaling means (Hugging Face's default for this family).
SCALING = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
PUBLISHED = re.compile(r"(.*\.experts\.)(gate_up_proj|down_proj)(|_bias|_blocks|_scales)")
PARTS = {"": "weight", "_bias": "bias", "_blocks": "weight", "_scales": "scales"}
RANKS = {"": 3, "_bias": 2, "_blocks": 4, "_scales": 3}


@dataclass(frozen=True)
class GptOssConfig(MoEConfig):
    ignored_keys: ClassVar[frozenset[str]] = ROUTING_KEYS | {"initial_context_length"}

    attention_bias: bool = True
    swiglu_alpha: float = config_field(high=1e6, default=1.702)
    swiglu_limit: float = config_field(high=1e6, default=7.0)

    def read_rope(self, raw):
        return super().read_rope(with_scaling(raw))

    @classmethod
    def rope_settings(cls, raw):
        return super().rope_settings(with_scaling(raw))

    def windows_without_types(self, raw):
        if self.sliding_window is None:
            raise BadCheckpoint("config.json has no sliding_window; gpt_oss needs it on every other layer")
        return tuple(None if i % 2 else self.sliding_window for i in range(self.num_hidden_layers))


def with_scaling(raw):
    given = raw.get("rope_scaling") is not None or raw.get("rope_parameters") is not None
    return raw if given else {**raw, "rope_scaling": SCALING}


class SinkAttention(Attention):
    def __init__(self, c):
        super().__init__(c, qkv_bias=c.attention_bias, o_bias=c.attention_bias)
        self.sinks = mx.zeros((self.heads,))


class GptOssMoE(KernelModule):
    def __init__(self, c):
        super().__init__()
        self.top_k = c.num_experts_per_tok
        self.router = nn.Linear(c.hidden_size, c.num_experts)
        own = partial(clamped, alpha=c.swiglu_alpha, limit=c.swiglu_limit)
        activation = "clamped" if (c.swiglu_alpha, c.swiglu_limit) == (1.702, 7.0) else own
        self.experts = Experts(c.num_experts, c.hidden_size, c.intermediate_size, activation=activation, bias=True)

    @property
    def input_linear(self) -> nn.Module:
        return self.router

    def __call__(self, x, *, norm=None, residual=None):
        if can_route(self.kernels, self.router, x):
            return self.experts.route_and_run(x, self.router, self.top_k, norm=norm, residual=residual, normalise=True)
        h = x if norm is None else norm(x)
        return self.experts(h, *topk_softmax(self.router(h), self.top_k), residual=residual)


class GptOss(Llama):
    Config = GptOssConfig
    NEEDS_BF16 = True

    def block(self, c, i):
        return Block(c, SinkAttention(c), GptOssMoE(c))

    @staticmethod
    def sanitize(config, arrays):
        """The published layouts: mxfp4 blocks, or plain [E, in, out]; gate and up rows take turns in both."""
        sanitized: dict[str, mx.array] = {}
        for name in list(arrays):
            array = arrays.pop(name)
            if not (found := PUBLISHED.fullmatch(name)):
                put(sanitized, name, array)
                continue
            path, matrix, kind = found.groups()
            array, part = rows_first(name, array, kind), PARTS[kind]
            if matrix == "gate_up_proj":
                put(sanitized, f"{path}gate_proj.{part}", array[:, ::2])
                put(sanitized, f"{path}up_proj.{part}", array[:, 1::2])
            else:
                put(sanitized, f"{path}down_proj.{part}", array)
        return sanitized


def rows_first(name: str, array: mx.array, kind: str) -> mx.array:
    """A published tensor as [E, out, ...]: a matrix as MLX has it, packed or not, a bias, or scales."""
    blocks = kind == "_blocks"
    if array.ndim != RANKS[kind] or (blocks and (array.dtype != mx.uint8 or array.shape[3] != 16)):
        raise BadCheckpoint(f"{quote(name)}: not the layout of gpt_oss, found {array.dtype} {list(array.shape)}")
    if blocks:  # [E, out, in / 32, 16]: bytes of two numbers, low half first, as are MLX's words of eight
        return array.flatten(2).view(mx.uint32)
    return array.swapaxes(1, 2) if kind == "" else array
