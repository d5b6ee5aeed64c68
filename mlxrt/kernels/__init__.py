"""Ops with kernels: one Metal text each, run by MLX on Metal and CUDA, by the simulator in tests."""

from .add_norm import add_norm
from .attention import attend_pages
from .coded_token import CodedToken, Packed
from .codes import Codes
from .delta import delta_step
from .embed import embed_rows
from .entry import Entry, attend_entry
from .experts import expert_down, expert_gate_up
from .greedy import greedy
from .grouped import grouped_product, mix, order_pairs
from .heads import Heads, Pages
from .kernels import MODES, PLAIN, Gpu, Kernels, backend, gpu_of
from .matmul import matmul
from .matvec import matvec
from .op import OPS, Case, Op, Source
from .packed_attention import PackedPages, attend_packed, attention_of
from .packing import Matrix
from .routed import route_gate_up
from .router import route
from .sums import matvec_of_sum
from .turn import turn
from .unpack import coded_unpack
from .vectors import vector_rows

__all__ = [
    "MODES",
    "OPS",
    "PLAIN",
    "Case",
    "CodedToken",
    "Codes",
    "Entry",
    "Gpu",
    "Heads",
    "Kernels",
    "Matrix",
    "Op",
    "Packed",
    "PackedPages",
    "Pages",
    "Source",
    "add_norm",
    "attend_entry",
    "attend_packed",
    "attend_pages",
    "attention_of",
    "backend",
    "coded_unpack",
    "delta_step",
    "embed_rows",
    "expert_down",
    "expert_gate_up",
    "gpu_of",
    "greedy",
    "grouped_product",
    "matmul",
    "matvec",
    "matvec_of_sum",
    "mix",
    "order_pairs",
    "route",
    "route_gate_up",
    "turn",
    "vector_rows",
]
