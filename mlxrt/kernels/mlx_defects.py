"""What MLX gets wrong on some devices, and the way round each. The place to look at when MLX is upgraded.

| defect, seen with MLX 0.32.4 on CUDA | way round |
|---|---|
| `strided_scan`: a cumulative sum over an axis of one number takes that axis's stride for the length of a row and writes outside of its buffer (illegal memory access, later "double free") | `cumsum` |
| `mx.fast.rope` gives a block more than 64 threads in z where fewer than 16 pairs rotate and there are 64 rows or more: `cudaGraphAddKernelNode failed: invalid argument` | `fast_rope` |
| `gather_mm` with `sorted_indices`: takes the step from row to row from an axis of one; loses its way in stacks above 2 GB | `gather_mm` |
| float32 products are TF32, with 11 bits, unless MLX_ENABLE_TF32=0 was set before the first one (M5 Macs too) | `ask_for_exact_float32` |

`python -m tests.gpu.check_defect NAME` says whether MLX still has one; `make test-gpu` reports all of them.
"""

import os

import mlx.core as mx

from .device import backend

MAX_SORTED_BYTES = (1 << 31) - 1  # of a stack that gather_mm finds its way in where rows are in order
MIN_ROPE_PAIRS = 16  # pairs x length: as many of a block's 1,024 threads, and MAX_Z are left for z
MAX_Z, HEADS_PER_THREAD = 64, 4
TF32 = "MLX_ENABLE_TF32"


def cumsum(x: mx.array, axis: int = -1) -> mx.array:
    """mx.cumsum that launches nothing where there is nothing to add."""
    return x if x.shape[axis] == 1 else mx.cumsum(x, axis=axis)


def fast_rope(
    x: mx.array, dims: int, *, base: float | None, scale: float, offset: mx.array, freqs: mx.array | None
) -> mx.array:
    """mx.fast.rope of x [N, heads, 1, D], each token at its own offset."""
    short = MIN_ROPE_PAIRS // (1 << (dims // 2).bit_length() - 1)  # by powers of two, as MLX counts
    threads = x.shape[0] * -(-x.shape[1] // HEADS_PER_THREAD)
    if short > 1 and threads > MAX_Z and backend() == "cuda":
        x = mx.pad(x, [(0, 0), (0, 0), (0, short - 1), (0, 0)])
    rotated = mx.fast.rope(x, dims, traditional=False, base=base, scale=scale, offset=offset, freqs=freqs)
    return rotated[:, :, :1]


def gather_mm(x: mx.array, stack: mx.array, experts: mx.array, *, ordered: bool = False) -> mx.array:
    """Rows by the matrices of a stack, each by the one it names: x [..., 1, K] by stack [E, K, O] -> [..., 1, O].

    `ordered` promises that `experts` [...] ascend.
    """
    if ordered and backend() == "cuda":
        x, ordered = x.flatten().reshape(x.shape), stack.nbytes <= MAX_SORTED_BYTES
    return mx.gather_mm(x, stack, rhs_indices=experts, sorted_indices=ordered)


def ask_for_exact_float32() -> str | None:
    """Have MLX multiply float32 as float32 in this process. None: it does; else why not, and what to do.

    MLX reads the variable at the first product and never again, so the answer is found by multiplying.
    """
    if backend() == "cpu":
        return None
    asked = os.environ.setdefault(TF32, "0")
    if float32_is_exact():
        return None
    if asked != "0":
        return f"{TF32}={asked} asks for that; unset it for exact products"
    return f"MLX had multiplied before {TF32}=0 could be set; set it before starting for exact products"


def float32_is_exact() -> bool:
    """Whether a product of float32 keeps more than TF32's 11 bits."""
    x = mx.full((64, 64), 1 + 2.0**-14)
    return bool(mx.all(x @ mx.eye(64) == x).item())
