"""Ops with kernels: one Metal source each, run by MLX on Metal and CUDA, by the simulator in tests."""

from .device import DeviceProfile, backend
from .dispatch import MODES, PLAIN, Gpu, Kernels, make_gpu
from .ops.add_norm import add_norm
from .ops.add_norm_qmv import add_norm_qmv
from .ops.argmax import argmax
from .ops.attention_layout import PackedKV, Pages, PrefillPages, QKVLayout, QuantizedPages
from .ops.attention_qmv import OutputProjection, attention_qmv, decode_attention
from .ops.codebook import codebook_rows
from .ops.concat_columns import concat_columns
from .ops.dequantize import dequantize
from .ops.draw import draw
from .ops.draw_rows import DrawPlan, DrawRow, pack_rows, pack_words
from .ops.embedding import embed_rows
from .ops.gated_delta import gated_delta_step
from .ops.gated_delta_prefill import PackedRows, gated_delta_prefill
from .ops.hadamard import hadamard
from .ops.kv_codec import KV_GROUPS, Codec, PlainKV, QuantizedKV
from .ops.linear import linear
from .ops.lut_matrix import LUTMatrix
from .ops.moe_fused import moe_router_gate_up
from .ops.moe_grouped import moe_combine, moe_grouped, moe_sort
from .ops.moe_qmv import moe_down, moe_gate_up
from .ops.moe_router import moe_router
from .ops.paged_attention import attention_op, paged_attention, quantized_paged_attention
from .ops.prefill_attention import encode_kv, prefill_attention
from .ops.qkv_attention import LazyQKV, compute_qkv, qkv_attention
from .ops.qmm import qmm
from .ops.qmv import qmv
from .ops.quantized import QuantizedMatrix
from .ops.rope import apply_rope
from .ops.top_logprobs import top_logprobs
from .registry import OPS, Case, KernelSource, Op

__all__ = [
    "KV_GROUPS", "MODES", "OPS", "PLAIN", "Case", "Codec", "DeviceProfile", "DrawPlan", "DrawRow", "Gpu", "KernelSource", "Kernels",
    "LUTMatrix", "LazyQKV", "Op", "OutputProjection", "PackedKV", "PackedRows", "Pages", "PlainKV", "PrefillPages", "QKVLayout", "QuantizedKV", "QuantizedMatrix",
    "QuantizedPages", "add_norm", "add_norm_qmv", "apply_rope", "argmax", "attention_op", "attention_qmv", "backend",
    "codebook_rows", "compute_qkv", "concat_columns", "decode_attention", "dequantize", "draw", "embed_rows", "encode_kv", "gated_delta_prefill", "gated_delta_step", "hadamard",
    "linear", "make_gpu", "moe_combine", "moe_down", "moe_gate_up", "moe_grouped", "moe_router",
    "moe_router_gate_up", "moe_sort", "pack_rows", "pack_words", "paged_attention", "prefill_attention", "qkv_attention", "qmm", "qmv",
    "quantized_paged_attention", "top_logprobs",
]  # fmt: skip
