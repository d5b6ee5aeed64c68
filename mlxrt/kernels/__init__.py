"""Ops with kernels: one Metal text each, run by MLX on Metal and CUDA, by the simulator in tests."""

from .dispatch import MODES, PLAIN, Gpu, Kernels, backend, gpu_of
from .ops.add_norm import add_norm
from .ops.add_norm_qmv import matvec_of_sum
from .ops.argmax import greedy
from .ops.codebook import vector_rows
from .ops.embedding import embed_rows
from .ops.gated_delta import delta_step
from .ops.hadamard import turn
from .ops.kv_quant import CodedToken, Packed
from .ops.linear import linear
from .ops.lut_dequantize import coded_unpack
from .ops.lut_matrix import LUTMatrix
from .ops.moe_fused import route_gate_up
from .ops.moe_grouped import grouped_product, mix, order_pairs
from .ops.moe_qmv import expert_down, expert_gate_up
from .ops.moe_router import route
from .ops.paged_attention import attend_pages
from .ops.qkv_attention import LazyQKV, compute_qkv, decode_attention, qkv_attention
from .ops.qkv_layout import Pages, QKVLayout
from .ops.qmm import matmul
from .ops.qmv import matvec
from .ops.quantized import Matrix
from .ops.quantized_attention import PackedPages, attend_packed, attention_op
from .registry import OPS, Case, InlineSource, Op, Source

__all__ = [
    "MODES",
    "OPS",
    "PLAIN",
    "Case",
    "CodedToken",
    "Gpu",
    "InlineSource",
    "Kernels",
    "LUTMatrix",
    "LazyQKV",
    "Matrix",
    "Op",
    "Packed",
    "PackedPages",
    "Pages",
    "QKVLayout",
    "Source",
    "add_norm",
    "attend_packed",
    "attend_pages",
    "attention_op",
    "backend",
    "coded_unpack",
    "compute_qkv",
    "decode_attention",
    "delta_step",
    "embed_rows",
    "expert_down",
    "expert_gate_up",
    "gpu_of",
    "greedy",
    "grouped_product",
    "linear",
    "matmul",
    "matvec",
    "matvec_of_sum",
    "mix",
    "order_pairs",
    "qkv_attention",
    "route",
    "route_gate_up",
    "turn",
    "vector_rows",
]
