"""Rows by the matrices of a stack, each by the one it names: MLX's gather_mm, kept from what it gets wrong."""

import mlx.core as mx

from ..device import backend

LARGEST = (1 << 31) - 1  # bytes of a stack that MLX 0.32.4 finds its way in on CUDA, where rows are in order


def gather_mm(x: mx.array, stack: mx.array, experts: mx.array, *, ordered: bool = False) -> mx.array:
    """x [..., 1, K] by stack [E, K, O] -> [..., 1, O]; `ordered` promises that `experts` [...] ascend."""
    if ordered and backend() == "cuda":
        # It takes the step from row to row from x's axis of one, whose stride need not be that.
        x, ordered = x.flatten().reshape(x.shape), stack.nbytes <= LARGEST
    return mx.gather_mm(x, stack, rhs_indices=experts, sorted_indices=ordered)
