"""MLX arrays as the bytes a kernel sees, and back. Knows no kernel."""

import ctypes
import math

import mlx.core as mx
import numpy as np


def memory(x: mx.array) -> tuple[bytes, list[int], int]:
    """Bytes, strides in elements, and the byte at which element 0 lies."""
    if x.dtype == mx.bfloat16:
        x = x.view(mx.uint16)
    mx.eval(x)
    if x.size == 0:
        return b"", [0] * x.ndim, 0
    seen = np.asarray(memoryview(x)) if x.ndim else np.array(x)
    strides = [s // seen.itemsize for s in seen.strides]
    if seen.flags.c_contiguous:
        return seen.tobytes(), strides, 0
    steps = [s * (n - 1) for s, n in zip(strides, seen.shape)]
    low, high = sum(min(0, s) for s in steps), sum(max(0, s) for s in steps)
    start = seen.__array_interface__["data"][0] + low * seen.itemsize
    return ctypes.string_at(start, (high - low + 1) * seen.itemsize), strides, -low * seen.itemsize


def array(raw: bytes, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    kind = np.dtype({mx.bfloat16: "uint16", mx.bool_: "bool"}.get(dtype) or str(dtype).removeprefix("mlx.core."))
    x = mx.array(np.frombuffer(raw, dtype=kind).reshape(shape))
    return x.view(mx.bfloat16) if dtype == mx.bfloat16 else x


def byte_count(shape: tuple[int, ...], dtype: mx.Dtype) -> int:
    return math.prod(shape) * dtype.size
