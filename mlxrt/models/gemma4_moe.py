"""A block of Gemma 4 26B-A4B: experts beside the dense MLP, each branch with norms of its own."""

import mlx.core as mx
import mlx.nn as nn

from ..kernels import route
from .base import Computing
from .fused_linear import matrix_of
from .gemma4_block import Gemma4Block
from .moe import Experts, choose_then_softmax


class Router(Computing):
    """Chooses from the residual itself, which it norms for itself. `scale` holds the stored one over sqrt(hidden)."""

    def __init__(self, c):
        super().__init__()
        self.eps, self.k = c.rms_norm_eps, c.top_k_experts
        self.proj = nn.Linear(c.hidden_size, c.num_experts, bias=False)
        self.scale = mx.ones((c.hidden_size,))
        self.per_expert_scale = mx.ones((c.num_experts,))

    def __call__(self, h):
        matrix = matrix_of(self.proj)
        if self.kernels.gpu is not None and matrix is not None:
            norm = {"norm": self.scale, "eps": self.eps, "normalise": True, "scales": self.per_expert_scale}
            return self.kernels.run(route, x=h, matrix=matrix, k=self.k, **norm)
        experts, weights = choose_then_softmax(self.proj(mx.fast.rms_norm(h, self.scale, self.eps)), self.k)
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
        return self.post_feedforward_layernorm_1(y) + self.post_feedforward_layernorm_2(sparse), h
