"""Blocks that several families share. A family that needs something else writes it in its own file."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..kernels import (
    Kernels,
    LazyQKV,
    OutputProjection,
    Pages,
    PrefillPages,
    QKVLayout,
    QuantizedPages,
    compute_qkv,
    decode_attention,
    encode_kv,
    prefill_attention,
)
from .base import CausalLM, FusedModule, KernelModule
from .fused_linear import concat_products, embed, fused_linear, kernel_matrix, lazy_qkv
from .quantized.packed_linear import PackedLinear
from .rope import RoPE


def concat_linears(linears: list[nn.Module]) -> nn.Module | None:
    """One matrix with the rows of several, or None where their formats differ."""
    if not all(type(m) in (nn.Linear, nn.QuantizedLinear, PackedLinear) for m in linears):
        return None  # other kinds hold more than rows
    kinds = {(type(m),) if type(m) is nn.Linear else (type(m), m.bits, m.group_size, m.mode) for m in linears}
    if len(kinds) > 1 or len({tuple(sorted(m)) for m in linears}) > 1:
        return None
    merged = type(linears[0]).__new__(type(linears[0]))
    nn.Module.__init__(merged)
    for name, value in vars(linears[0]).items():  # bits, group_size, mode
        if name not in vars(merged):
            setattr(merged, name, value)
    for name in linears[0]:
        shared = name.startswith("_")  # no parameter, but a table of the format
        merged[name] = linears[0][name] if shared else mx.concatenate([m[name] for m in linears])
    return merged


def take_rows(linear: nn.Module, rows: mx.array) -> nn.Module | None:
    """A linear with some rows of another's matrix, or None where its format holds more than rows."""
    if (taken := concat_linears([linear])) is None:
        return None
    for name in taken.parameters():
        taken[name] = mx.contiguous(linear[name][rows])
    return taken


def merge_linears(module: nn.Module, names: Sequence[str], merged: str) -> None:
    """One linear called `merged` in place of those called `names`, where their formats allow it."""
    if len(names) > 1 and (linear := concat_linears([module[name] for name in names])):
        module[merged] = linear
        for name in names:
            del module[name]


QKV_PARTS = ("qk_proj", "q_proj", "k_proj", "v_proj")  # where they are not one matrix


def merge_qkv(attention: nn.Module) -> None:
    """Merge the projections that there are: all as qkv_proj, or queries and keys as qk_proj where values differ."""
    merge_linears(attention, [name for name in QKV_PARTS if name in attention], "qkv_proj")
    if "v_proj" in attention:
        merge_linears(attention, [name for name in ("q_proj", "k_proj") if name in attention], "qk_proj")


def attend(
    qkv: mx.array | LazyQKV,
    kv,
    layout: QKVLayout,
    rope: RoPE,
    kernels: Kernels,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: mx.array | None = None,
    output: nn.Module | None = None,
    residual: mx.array | None = None,
) -> mx.array:
    """qkv [N, heads * D], of any number of sequences, over the layer's view `kv` -> [N, Hq * D].

    With `output`: that linear layer of it, plus the residual. By the paged kernel where a decode step can use it, on
    CPUs also in steps with prompts; else by plain MLX.
    """
    params: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": sinks}
    pages = kv.pages() if kernels.gpu is not None or kernels.cpu is not None else None
    if pages is not None and (kernels.gpu is not None or runs_on_cpu(layout, pages)):
        params |= {"layout": layout, "window": kv.spec.window, "keep": kv.spec.keep}
        rows = qkv if isinstance(qkv, mx.array) else qkv.x
        matrix = None if output is None or kernels.gpu is None else kernel_matrix(output, rows, kernels)
        if output is not None and matrix is not None:
            params["output"] = OutputProjection(matrix, output.get("bias"), residual)
        y, tail = decode_attention(kernels, qkv, pages, **params)
        kv.replace_tail(tail)
        if matrix is not None:
            return y
    elif (prompt := kv.prefill_pages() if kernels.cpu is not None else None) and runs_on_cpu(layout, prompt):
        qkv = compute_qkv(qkv, kernels)
        if qkv.shape[1] > layout.num_heads * layout.head_dim:
            kv.write_encoded(*kernels.run(encode_kv, qkv=qkv, layout=layout, pages=prompt))
            prompt = kv.prefill_pages()
        params |= {"layout": layout, "window": kv.spec.window, "keep": kv.spec.keep}
        y = kernels.run(prefill_attention, qkv=qkv, pages=prompt, **params)
    else:
        q, *new = layout.prepare(compute_qkv(qkv, kernels), kv.positions, rope)  # [N, heads, D] each
        y = kv.attend(q, *new, **params).flatten(1)
    return y if output is None else fused_linear(output, y, kernels, residual=residual)


def runs_on_cpu(layout: QKVLayout, pages: Pages | QuantizedPages | PrefillPages) -> bool:
    """Whether the CPU's attention kernel takes them: float32 pages, plain or quantised, and a layout with its RoPE."""
    return pages.codec.dtype == mx.float32 and layout.inv_freq is not None and layout.head_dim % 16 == 0


class Attention(FusedModule):
    softcap: float | None = None
    layout: QKVLayout | None = None  # with the constants a kernel needs

    def __init__(self, c, *, qkv_bias=False, o_bias=False, qk_norm=False):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.scale = self.head_dim**-0.5
        self.q_proj = nn.Linear(c.hidden_size, self.heads * self.head_dim, bias=qkv_bias)
        self.k_proj = nn.Linear(c.hidden_size, self.kv_heads * self.head_dim, bias=qkv_bias)
        self.v_proj = nn.Linear(c.hidden_size, self.kv_heads * self.head_dim, bias=qkv_bias)
        self.o_proj = nn.Linear(self.heads * self.head_dim, c.hidden_size, bias=o_bias)
        self.qk_norm = qk_norm  # head by head
        if qk_norm:
            self.q_norm = nn.RMSNorm(self.head_dim, eps=c.rms_norm_eps)
            self.k_norm = nn.RMSNorm(self.head_dim, eps=c.rms_norm_eps)
        self.rope = RoPE(c.rope)

    def fuse(self):
        self.merge_projections()
        if self.kernels.gpu is not None or self.kernels.cpu is not None:
            self.layout = replace(self.qkv_layout(), **self.rope.constants())

    def merge_projections(self) -> None:
        merge_qkv(self)

    def qkv_layout(self) -> QKVLayout:
        norms = (self.q_norm.weight, self.k_norm.weight, False, self.q_norm.eps) if self.qk_norm else ()
        return QKVLayout(self.heads, self.kv_heads, self.head_dim, *norms)

    @property
    def input_linear(self) -> nn.Module | None:
        """The linear that reads the block's input norm."""
        return self.get("qkv_proj")

    def qkv(self, x, norm=None) -> LazyQKV | mx.array:
        """[N, (Hq + 2 Hkv) * D]: q, k, v."""
        if "qkv_proj" in self:
            return lazy_qkv(self.qkv_proj, x, self.kernels, norm)
        return concat_products([self[name] for name in QKV_PARTS if name in self], x, self.kernels, norm)

    def attend(self, qkv, kv, **output):
        """qkv [N, heads * D] -> [N, Hq * D], or what `output` makes of it."""
        layout, scores = self.layout or self.qkv_layout(), {"scale": self.scale, "softcap": self.softcap}
        return attend(qkv, kv, layout, self.rope, self.kernels, sinks=self.get("sinks"), **scores, **output)

    def __call__(self, x, kv, *, norm=None, residual=None):
        return self.attend(self.qkv(x, norm), kv, output=self.o_proj, residual=residual)


class GatedMLP(FusedModule):
    activation = "silu"

    def __init__(self, dim, hidden, *, bias=False):
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=bias)
        self.up_proj = nn.Linear(dim, hidden, bias=bias)
        self.down_proj = nn.Linear(hidden, dim, bias=bias)

    def fuse(self):
        merge_linears(self, ("gate_proj", "up_proj"), "gate_up_proj")

    @property
    def input_linear(self) -> nn.Module | None:
        return self.get("gate_up_proj")

    def __call__(self, x, *, norm=None, residual=None):
        if "gate_up_proj" in self:
            h = fused_linear(self.gate_up_proj, x, self.kernels, norm=norm, activation=self.activation, pair=True)
        else:
            up = fused_linear(self.up_proj, x, self.kernels, norm=norm)
            h = fused_linear(self.gate_proj, x, self.kernels, norm=norm, activation=self.activation, times=up)
        return fused_linear(self.down_proj, h, self.kernels, residual=residual)


class Block(FusedModule):
    """Pre-norm block: norms and residual sums are fused into the linear layers next to them.

    `name`: of the mixer (attention, or what is in its place) in checkpoints.
    """

    def __init__(self, c, mixer, mlp, name="self_attn"):
        super().__init__()
        self[name], self.mlp, self._mixer = mixer, mlp, name
        self.input_layernorm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)

    def fuse(self):
        self.pack_norms(self.input_layernorm, into=self[self._mixer])
        self.pack_norms(self.post_attention_layernorm, into=self.mlp)

    def __call__(self, x, memory):
        h = self[self._mixer](x, memory, norm=self.input_layernorm, residual=x)
        return self.mlp(h, norm=self.post_attention_layernorm, residual=h)


class Decoder(KernelModule):
    """Embedding and blocks. The head applies the last norm, to the rows that are sampled."""

    scale = 1.0  # of embeddings

    def __init__(self, c, blocks):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = blocks
        self.norm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)

    def embed(self, tokens):
        return embed(self.embed_tokens, tokens, self.kernels, self.norm.weight.dtype, self.scale)

    def __call__(self, tokens, views):
        h = self.embed(tokens)
        for layer, view in zip(self.layers, views, strict=True):
            h = layer(h, view)
        return h


class DecoderLM(CausalLM):
    """A decoder with a head, tied or not."""

    Stack: type[Decoder] = Decoder

    def __init__(self, c, blocks):
        super().__init__()
        self.config = c
        self.model = self.Stack(c, blocks)
        if not c.tie_word_embeddings:
            self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)

    def __call__(self, tokens, views):
        return self.model(tokens, views)

    def logits(self, hidden):
        return fused_linear(self.head, hidden, self.kernels, norm=self.model.norm, softcap=self.softcap)

    @property
    def softcap(self) -> float | None:
        """logits = softcap * tanh(logits / softcap)."""
        return None

    @property
    def head(self) -> nn.Module:
        return self.lm_head if "lm_head" in self else self.model.embed_tokens

    def head_modules(self):
        return self.model.norm, self.head

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype of activations, and so of keys and values."""
        return self.model.norm.weight.dtype
