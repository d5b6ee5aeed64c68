"""Mixture of experts: stacked expert matrices, routing, and the keys configs with experts share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import mlx.core as mx
import mlx.nn as nn

from ..errors import BadCheckpoint, quote
from ..kernels import (
    Kernels,
    QuantizedMatrix,
    moe_combine,
    moe_down,
    moe_gate_up,
    moe_grouped,
    moe_router,
    moe_router_gate_up,
    moe_sort,
)
from ..kernels.mlx_defects import gather_mm
from ..kernels.ops.activation import GATES
from ..kernels.ops.moe_qmv import MAX_QMV_TOKENS
from .base import FusedModule, KernelModule
from .config import SUPPORTED_VALUES, ModelConfig
from .fused_linear import matrix_of, norm_arguments, packed_matrix, rms_norm
from .layers import GatedMLP
from .quantized.lut_linear import LUTExpertLinear
from .quantized.packed_linear import PackedExpertLinear

GROUPED = 8  # tokens from which an expert is likely to have more than one of them
MIN_SORTED_PAIRS = 64  # (token, expert) pairs from which sorting them by expert pays: each matrix is then read once
ROUTING_KEYS = frozenset({"router_aux_loss_coef", "router_jitter_noise", "aux_loss_alpha"})  # of training only


@dataclass(frozen=True)
class MoEConfig(ModelConfig):
    ignored_keys: ClassVar[frozenset[str]] = ROUTING_KEYS
    # other spelling -> the field's name
    spellings: ClassVar[Mapping[str, str]] = {
        "num_local_experts": "num_experts",
        "experts_per_token": "num_experts_per_tok",
    }

    num_experts: int = field(kw_only=True)
    num_experts_per_tok: int = field(kw_only=True)

    @classmethod
    def parse(cls, raw: Mapping[str, Any], supported: Mapping[str, tuple] = SUPPORTED_VALUES) -> Self:
        return super().parse(rename_keys(raw, cls.spellings), supported)

    def has_experts(self, layer: int) -> bool:
        return True

    def _complete(self, raw) -> Self:
        if not self.intermediate_size and not all(map(self.has_experts, range(self.num_hidden_layers))):
            raise BadCheckpoint("config.json has no intermediate_size; the layers without experts need it")
        if self.num_experts_per_tok > self.num_experts:
            raise BadCheckpoint(
                f"config.json: num_experts_per_tok = {self.num_experts_per_tok} of only {self.num_experts} experts"
            )
        return super()._complete(raw)


def is_sparse(layer: int, step: int, dense: Sequence[int] | None) -> bool:
    """Whether a layer has experts, as Qwen's families say it: every `step`-th one but the `dense` ones."""
    return layer not in (dense or ()) and (layer + 1) % step == 0


def rename_keys(raw: Mapping[str, Any], spellings: Mapping[str, str]) -> dict[str, Any]:
    """The config with the names of keys that we use."""
    same = dict(raw)
    for other, name in spellings.items():
        if other not in same:
            continue
        value = same.pop(other)
        if name in same and same[name] != value:
            raise BadCheckpoint(
                f"config.json: {other} = {quote(value)} contradicts {name} = {quote(same[name])}; remove one"
            )
        same[name] = value
    return same


class ExpertLinear(nn.Module):
    """One matrix [out, in] per expert, kept as a stack [E, out, in]."""

    def __init__(self, count: int, inputs: int, outputs: int, *, bias: bool = False):
        super().__init__()
        bound = inputs**-0.5
        self.weight = mx.random.uniform(-bound, bound, (count, outputs, inputs))
        if bias:
            self.bias = mx.zeros((count, outputs))

    def __call__(self, x: mx.array, experts: mx.array, *, ordered: bool = False) -> mx.array:
        """x [..., 1, in] through the matrices of `experts` [...]; `ordered` promises that those ascend."""
        w, dtype = self.weight, x.dtype
        if dtype != mx.float32 and mx.default_device() == mx.Device(mx.cpu):
            x, w = x.astype(mx.float32), w.astype(mx.float32)  # MLX's CPU has no other
        y = gather_mm(x, w.swapaxes(-1, -2), experts, ordered=ordered).astype(dtype)
        return y + self.bias[experts][..., None, :] if "bias" in self else y

    def to_quantized(self, group_size: int, bits: int, mode: str = "affine") -> "QuantizedExpertLinear":
        return QuantizedExpertLinear(self, group_size, bits, mode)


class QuantizedExpertLinear(nn.Module):
    """An ExpertLinear in one of MLX's quantised layouts."""

    def __init__(self, plain: ExpertLinear, group_size: int, bits: int, mode: str):
        super().__init__()
        self.group_size, self.bits, self.mode = group_size, bits, mode
        self.weight, self.scales, *biases = mx.quantize(plain.weight, group_size, bits, mode=mode)
        if biases:
            self.biases = biases[0]
        if "bias" in plain:
            self.bias = plain.bias

    def __call__(self, x: mx.array, experts: mx.array, *, ordered: bool = False) -> mx.array:
        y = mx.gather_qmm(
            x,
            self.weight,
            self.scales,
            self.get("biases"),
            rhs_indices=experts,
            transpose=True,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
            sorted_indices=ordered,
        )
        return y + self.bias[experts][..., None, :] if "bias" in self else y


def expert_matrix(linear: nn.Module) -> QuantizedMatrix | None:
    """The stack as kernels read it; None for other formats."""
    if type(linear) is ExpertLinear:
        return QuantizedMatrix(linear["weight"])
    if type(linear) is LUTExpertLinear and "divisor" not in linear:
        return linear.matrix
    if isinstance(linear, PackedExpertLinear):
        return linear.matrix
    if type(linear) is not QuantizedExpertLinear:
        return None
    return packed_matrix(linear)


def same_format(a: nn.Module, b: nn.Module) -> bool:
    """Whether two stacks have one format, so that they can be concatenated."""
    if type(a) is not type(b) or set(a) != set(b):
        return False
    if isinstance(a, LUTExpertLinear):
        return a.coding == b.coding and expert_matrix(a) is not None
    if isinstance(a, QuantizedExpertLinear | PackedExpertLinear):
        return (a.bits, a.group_size, a.mode) == (b.bits, b.group_size, b.mode)
    return type(a) is ExpertLinear


def prepare_input(linear: nn.Module, x: mx.array) -> mx.array:
    """x, rotated if the rows of the stack are."""
    return linear.rotate_input(x, x.dtype) if isinstance(linear, LUTExpertLinear) else x


class Experts(FusedModule):
    """Gated MLPs [E], of which every token uses some: `activation(gate, up)` between the matrices, or its name."""

    def __init__(
        self,
        count: int,
        dim: int,
        hidden: int,
        *,
        activation: str | Callable[[mx.array, mx.array], mx.array] = "silu",
        bias: bool = False,
    ):
        super().__init__()
        self.kernel = activation if isinstance(activation, str) else None  # what kernels call it, if they have it
        self.activation = GATES[activation] if isinstance(activation, str) else activation
        self.gate_proj = ExpertLinear(count, dim, hidden, bias=bias)
        self.up_proj = ExpertLinear(count, dim, hidden, bias=bias)
        self.down_proj = ExpertLinear(count, hidden, dim, bias=bias)

    def fuse(self) -> None:
        if same_format(self.gate_proj, self.up_proj):
            whole = self.gate_proj
            for name in whole.parameters():  # arrays with a row per output; centroids and signs are the same in both
                whole[name] = mx.concatenate([whole[name], self.up_proj[name]], axis=1)
            self.gate_up_proj = whole
            del self["gate_proj"], self["up_proj"]

    def __call__(
        self,
        x: mx.array,
        experts: mx.array,
        weights: mx.array,
        *,
        norm: nn.RMSNorm | None = None,
        residual: mx.array | None = None,
    ) -> mx.array:
        """The weighted sum [N, dim] of what `experts` [N, K] make of norm(x) [N, dim]; weights [N, K]; + residual."""
        if self.has_kernels(x):
            return self.launch(x, experts, weights, norm, residual)
        x = x if norm is None else norm(x)
        if experts.size < MIN_SORTED_PAIRS:
            y = self.run_experts(x[:, None, None], experts, ordered=False)  # [N, K, 1, dim]
            y = y[:, :, 0]
        else:
            order = mx.argsort(experts.flatten())
            y = self.run_experts(x[order // experts.shape[1]][:, None], experts.flatten()[order], ordered=True)
            y = y[mx.argsort(order)].reshape(*experts.shape, -1)  # [N, K, dim]
        y = (y * weights.astype(y.dtype)[..., None]).sum(axis=1)
        return y if residual is None else residual + y

    def has_kernels(self, x: mx.array) -> bool:
        """Whether there are kernels for experts of this kind and so many tokens."""
        if self.kernel is None or "gate_up_proj" not in self or expert_matrix(self.down_proj) is None:
            return False
        if self.kernels.gpu is None:  # CPU kernels read what pack_modules.py put in their place
            stacks = self.gate_up_proj, self.down_proj
            return self.kernels.cpu is not None and all(isinstance(m, PackedExpertLinear) for m in stacks)
        if x.shape[0] <= MAX_QMV_TOKENS:
            return True
        # Many tokens on an H200, a layer of Qwen3-30B-A3B: 1.20 ms against 2.53 of gather_qmm's for 128, 1.26 against
        # 9.06 for 512. Not measured on a Mac, whose gather_qmm differs.
        packed = isinstance(self.gate_up_proj, LUTExpertLinear | PackedExpertLinear)
        return (packed or self.kernels.gpu.name == "cuda") and self.is_grouped(x)

    def is_grouped(self, x: mx.array) -> bool:
        """Whether every expert is read once for all of its tokens: on a CPU always."""
        if self.kernels.gpu is None:
            return True
        stacks = self.gate_up_proj, self.down_proj
        return x.shape[0] >= GROUPED and not any(moe_grouped.unsupported(x, expert_matrix(m)) for m in stacks)

    def launch(self, x, experts, weights, norm, residual):
        first = self.gate_up_proj
        if norm is not None and (self.is_grouped(x) or isinstance(first, LUTExpertLinear)):
            x, norm = rms_norm(norm, x, self.kernels), None  # the norm comes before the rotation
        x = prepare_input(first, x)
        if self.is_grouped(x):
            return self.launch_grouped(x, experts, weights, residual)
        return self.down(
            self.kernels.run(moe_gate_up, x=x, experts=experts, **self.gate_up_args(norm)), experts, weights, residual
        )

    def route_and_run(self, x, gate, k, *, norm=None, residual=None, **rules):
        """Route to `k` experts by the linear layer `gate` and run them, by kernels; `rules` are the routing op's."""
        if not self.has_kernels(x) or self.is_grouped(x) or isinstance(self.gate_up_proj, LUTExpertLinear):
            return self(x, *route_tokens(self, gate, x, k, norm=norm, **rules), norm=norm, residual=residual)
        router = {"router": matrix_of(gate), "rbias": gate.get("bias"), "k": k}
        h, experts, weights = self.kernels.run(moe_router_gate_up, x=x, **router, **self.gate_up_args(norm), **rules)
        return self.down(h, experts, weights, residual)

    def gate_up_args(self, norm):
        """The arguments of the gate-up ops."""
        first = self.gate_up_proj
        product = {"matrix": expert_matrix(first), "activation": self.kernel, "bias": first.get("bias")}
        return product | norm_arguments(norm)

    def down(self, h, experts, weights, residual):
        last = self.down_proj
        where = {"experts": experts, "weights": weights, "bias": last.get("bias"), "residual": residual}
        return self.kernels.run(moe_down, x=prepare_input(last, h), matrix=expert_matrix(last), **where)

    def launch_grouped(self, x, experts, weights, residual):
        """Reads every expert once for all of its tokens."""
        first, last, run = expert_matrix(self.gate_up_proj), expert_matrix(self.down_proj), self.kernels.run
        assert first is not None and last is not None
        order, bounds = run(moe_sort, experts=experts, count=first.weight.shape[0])
        where = {"experts": experts, "order": order, "bounds": bounds}
        what = {"matrix": first, "each": experts.shape[1], "activation": self.kernel, "pair": True, "dtype": x.dtype}
        h = run(moe_grouped, x=x, bias=self.gate_up_proj.get("bias"), **where, **what)
        what = {"matrix": last, "each": 1, "dtype": mx.float32, "bias": self.down_proj.get("bias")}
        parts = run(moe_grouped, x=prepare_input(self.down_proj, h), **where, **what)
        return run(moe_combine, parts=parts, weights=weights, dtype=x.dtype, residual=residual)

    def run_experts(self, x: mx.array, experts: mx.array, *, ordered: bool) -> mx.array:
        if "gate_up_proj" in self:
            gate, up = mx.split(self.gate_up_proj(x, experts, ordered=ordered), 2, axis=-1)
        else:
            gate, up = self.gate_proj(x, experts, ordered=ordered), self.up_proj(x, experts, ordered=ordered)
        return self.down_proj(self.activation(gate, up), experts, ordered=ordered)


class SparseMoE(KernelModule):
    """Experts behind the router most families have: a linear layer and a softmax."""

    def __init__(self, count: int, dim: int, hidden: int, top_k: int, *, normalise: bool):
        super().__init__()
        self.top_k, self.normalise = top_k, normalise
        self.gate = nn.Linear(dim, count, bias=False)
        self.experts = Experts(count, dim, hidden)

    @property
    def input_linear(self) -> nn.Module:
        return self.gate

    def __call__(self, x: mx.array, *, norm: nn.RMSNorm | None = None, residual: mx.array | None = None) -> mx.array:
        if can_route(self.kernels, self.gate, x):
            around = {"norm": norm, "residual": residual, "normalise": self.normalise}
            return self.experts.route_and_run(x, self.gate, self.top_k, **around)
        h = x if norm is None else norm(x)
        chosen = softmax_topk(self.gate(h), self.top_k, normalise=self.normalise)
        return self.experts(h, *chosen, residual=residual)


class SharedExpertMoE(SparseMoE):
    """Experts, and one more that every token uses as far as its gate lets it.

    To kernels the shared expert is a mixture of one, whose gate is a router with a sigmoid.
    """

    def __init__(self, c):
        k, normalise = c.num_experts_per_tok, c.norm_topk_prob
        super().__init__(c.num_experts, c.hidden_size, c.moe_intermediate_size, k, normalise=normalise)
        self.shared_expert = GatedMLP(c.hidden_size, c.shared_expert_intermediate_size)
        self.shared_expert_gate = nn.Linear(c.hidden_size, 1, bias=False)

    def __call__(self, x, *, norm=None, residual=None):
        if self.has_kernels(x):
            if x.shape[0] >= GROUPED and norm is not None:
                x, norm = rms_norm(norm, x, self.kernels), None  # once for all that read it
            return self.add_shared(x, norm, super().__call__(x, norm=norm, residual=residual))
        h = x if norm is None else norm(x)
        y = super().__call__(h) + mx.sigmoid(self.shared_expert_gate(h)) * self.shared_expert(h)
        return y if residual is None else residual + y

    def has_kernels(self, x: mx.array) -> bool:
        """Whether kernels read all matrices, and there are few enough tokens."""
        shared = self.shared_expert
        linears = self.gate, self.shared_expert_gate, shared.get("gate_up_proj"), shared.down_proj
        few = self.kernels.gpu is not None and x.shape[0] <= MAX_QMV_TOKENS
        return few and all(m is not None and matrix_of(m) is not None for m in linears)

    def add_shared(self, x, norm, residual):
        """residual + the shared expert of norm(x), times its gate."""
        shared, gate, run = self.shared_expert, self.shared_expert_gate, self.kernels.run
        if x.shape[0] >= GROUPED:  # every matrix is read once for all tokens
            _, weights = route_tokens(self, gate, x, 1, norm=norm, sigmoid=True)
            return run(moe_combine, parts=shared(x, norm=norm), weights=weights, dtype=x.dtype, residual=residual)
        first, last = matrix_of(shared.gate_up_proj), matrix_of(shared.down_proj)
        product = {"matrix": first, "activation": shared.activation, **norm_arguments(norm)}
        h, experts, weights = run(moe_router_gate_up, x=x, router=matrix_of(gate), k=1, sigmoid=True, **product)
        return run(moe_down, x=h, experts=experts, weights=weights, matrix=last, residual=residual)


def can_route(kernels: Kernels, gate: nn.Module, x: mx.array) -> bool:
    """Whether a kernel chooses the experts: on a GPU of few tokens."""
    if matrix_of(gate) is None:
        return False
    return kernels.cpu is not None or (kernels.gpu is not None and x.shape[0] <= MAX_QMV_TOKENS)


def route_tokens(owner: KernelModule, gate: nn.Module, x: mx.array, k: int, *, norm: nn.RMSNorm | None = None, **rules):
    """(experts, weights) by the kernel that fuses norm, router and top-k."""
    what = {"matrix": matrix_of(gate), "k": k, "bias": gate.get("bias")}
    return owner.kernels.run(moe_router, x=x, **what, **norm_arguments(norm), **rules)


def argtopk(scores: mx.array, k: int) -> mx.array:
    """Indices of the k largest of each row, unordered."""
    return mx.argpartition(-scores, kth=k - 1, axis=-1)[..., :k]


def softmax_topk(logits: mx.array, k: int, *, normalise: bool) -> tuple[mx.array, mx.array]:
    """(experts [N, k], weights [N, k] in float32): softmax over all experts, then top-k."""
    shares = mx.softmax(logits.astype(mx.float32), axis=-1)
    experts = argtopk(shares, k)
    weights = mx.take_along_axis(shares, experts, axis=-1)
    return experts, weights / weights.sum(axis=-1, keepdims=True) if normalise else weights


def topk_softmax(logits: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """Top-k, then softmax over the chosen experts only."""
    experts = argtopk(logits, k)
    return experts, mx.softmax(mx.take_along_axis(logits, experts, axis=-1).astype(mx.float32), axis=-1)


def sigmoid_topk(logits: mx.array, bias: mx.array, k: int, *, normalise: bool) -> tuple[mx.array, mx.array]:
    """Sigmoid scores; `bias` [E] affects the choice of experts, not their weights."""
    scores = mx.sigmoid(logits.astype(mx.float32))
    experts = argtopk(scores + bias, k)
    weights = mx.take_along_axis(scores, experts, axis=-1)
    return experts, weights / weights.sum(axis=-1, keepdims=True) if normalise else weights
