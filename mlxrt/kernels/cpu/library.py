"""The compiled CPU kernels by ctypes: products with packed matrices, and rows of them.

Arrays are read where MLX has them; nothing is copied but what comes out. A call computes at once, so its inputs are
evaluated first: these kernels are no part of MLX's graphs.
"""

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

FORMATS = {"affine": 0, "q2_k": 1, "q3_k": 2, "q4_k": 3, "q5_k": 4, "q6_k": 5}
SCALE_TYPES = {mx.float32: 0, mx.float16: 1, mx.bfloat16: 2}
GATES = {None: 0, "silu": 1}
ERRORS = {1: "no memory for the product", 2: "a format that the library does not read"}


class Matrix(ctypes.Structure):
    """`matrix` of packed.h."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("biases", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("row_bytes", ctypes.c_int64),
        ("format", ctypes.c_int32),
        ("bits", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("scale_type", ctypes.c_int32),
    )


class Attention(ctypes.Structure):
    """`attention` of attention.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in "qkv pool tail table row_range q_norm k_norm inv_freq sinks out".split()),
        *(
            (name, ctypes.c_int64)
            for name in "rows heads kv_heads dim pool_blocks size row_blocks tail_size pairs window new_heads".split()
        ),
        *((name, ctypes.c_float) for name in "eps magnitude scale softcap".split()),
        *((name, ctypes.c_int32) for name in "v_norm tied".split()),
    )


@dataclass(frozen=True)
class Pinned:
    """A matrix as C sees it, and the arrays whose memory it names."""

    matrix: Matrix
    address: int
    arrays: tuple[mx.array, ...]


def pointer_to(array: mx.array | None) -> Any:
    """Where an array's numbers lie, evaluated and without gaps; None for None. Holds the array."""
    if array is None:
        return None
    view = memoryview(array)  # type: ignore[arg-type]  # evaluates it
    if not view.c_contiguous:
        view = memoryview(mx.contiguous(array))  # type: ignore[arg-type]
    return ctypes.c_char.from_buffer(view)


def address_of(array: mx.array | None) -> Any:
    """The same as an argument of a C function, which holds the array for the call."""
    return None if array is None else ctypes.byref(pointer_to(array))


class CpuKernels:
    """One for a model: it holds the matrices it has seen, whose memory must not move."""

    name = "cpu"

    def __init__(self, path: Path, threads: int):
        library = ctypes.CDLL(str(path))
        self.path, self.threads = path, threads
        pointer, long = ctypes.c_void_p, ctypes.c_int64
        self._matmul, self._unpack_rows = library.mlxrt_matmul, library.mlxrt_unpack_rows
        self._matmul.argtypes = [
            pointer, pointer, long, pointer, ctypes.c_float, pointer, ctypes.c_int, pointer, pointer, ctypes.c_int
        ]  # fmt: skip
        self._unpack_rows.argtypes = [pointer, pointer, long, ctypes.c_float, pointer]
        self._attention = library.mlxrt_attention
        self._attention.argtypes = [pointer, ctypes.c_int]
        library.mlxrt_vector_name.restype = ctypes.c_char_p
        self.vectors = library.mlxrt_vector_name().decode()
        self._pinned: dict[int, Pinned] = {}

    def pin(self, matrix: Any) -> Pinned:
        """The matrix (a QuantizedMatrix) for C; made once."""
        found = self._pinned.get(id(matrix.weight))
        if found is not None:
            return found
        given = [matrix.weight, *(a for a in (matrix.scales, matrix.biases) if a is not None)]
        arrays = tuple(map(mx.contiguous, given))
        mx.eval(arrays)
        # Python has no bfloat16: its bits are looked at as integers.
        raw = [a.view(mx.uint16) if a.dtype == mx.bfloat16 else a for a in arrays]
        mx.eval(raw)
        at = [ctypes.addressof(pointer_to(a)) for a in raw] + [None] * (3 - len(arrays))
        row_bytes = matrix.weight.shape[1] * matrix.weight.itemsize
        kind = SCALE_TYPES[arrays[1].dtype] if len(arrays) > 1 else 0
        shape = (matrix.rows, matrix.width, row_bytes, FORMATS[matrix.mode], matrix.bits, matrix.group, kind)
        made = Matrix(*at, *shape)
        # `weight` itself is kept too: its id names the entry.
        self._pinned[id(matrix.weight)] = pinned = Pinned(made, ctypes.addressof(made), (*raw, matrix.weight))
        return pinned

    def matmul(
        self,
        x: mx.array,
        matrix: Any,
        norm: mx.array | None = None,
        eps: float = 0.0,
        bias: mx.array | None = None,
        gate: str | None = None,
        residual: mx.array | None = None,
    ) -> mx.array:
        """gate(matrix @ RMSNorm(x) + bias) + residual; a gate takes the first half of the outputs times the second."""
        pinned, rows = self.pin(matrix), x.shape[0]
        y = np.empty((rows, matrix.rows // 2 if gate else matrix.rows), np.float32)
        at = [address_of(a) for a in (x, norm, bias, residual)]
        raise_error(
            self._matmul(
                pinned.address, at[0], rows, at[1], eps, at[2], GATES[gate], at[3], y.ctypes.data, self.threads
            )
        )
        return mx.array(y)

    def attend(
        self,
        qkv: mx.array,
        layout: Any,
        pages: Any,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:
        """(out [R, heads * dim], the tail with the new token) of a QKVLayout and Pages, both float32."""
        table, row_range = (a if a.dtype == mx.int32 else a.astype(mx.int32) for a in (pages.table, pages.row_range))
        given = (qkv, pages.pool, pages.tail, table, row_range, layout.q_norm, layout.k_norm, layout.inv_freq, sinks)
        held = [pointer_to(a) for a in given]
        at: list[int | None] = [None if p is None else ctypes.addressof(p) for p in held]
        rows, dim, heads = qkv.shape[0], layout.head_dim, layout.num_heads
        tail, out = np.array(pages.tail), np.empty((rows, heads * dim), np.float32)
        at[2] = tail.ctypes.data
        pool_blocks, _, size, _ = pages.pool.shape
        pairs = 0 if layout.inv_freq is None else layout.inv_freq.shape[0]
        new_heads = qkv.shape[1] // dim - heads
        call = Attention(
            *at, out.ctypes.data, rows, heads, layout.num_kv_heads, dim, pool_blocks, size, table.shape[1],
            tail.shape[2], pairs, window or 0, new_heads, layout.eps, layout.magnitude, scale, softcap or 0.0,
            layout.v_norm, layout.tied,
        )  # fmt: skip
        raise_error(self._attention(ctypes.addressof(call), self.threads))
        return mx.array(out), mx.array(tail) if new_heads else pages.tail

    def unpack_rows(self, matrix: Any, rows: mx.array, scale: float = 1.0) -> mx.array:
        """[N, width]: these rows of the matrix, times `scale`."""
        wanted = np.array(rows, np.int64).reshape(-1)
        if wanted.size and not 0 <= wanted.min() <= wanted.max() < matrix.rows:
            wanted = wanted.clip(0, matrix.rows - 1)  # MLX reads beyond its arrays; nobody looks at such rows
        y = np.empty((wanted.size, matrix.width), np.float32)
        pinned = self.pin(matrix)
        raise_error(self._unpack_rows(pinned.address, wanted.ctypes.data, wanted.size, scale, y.ctypes.data))
        return mx.array(y)


def raise_error(status: int) -> None:
    if status:
        raise RuntimeError(f"CPU kernels: {ERRORS.get(status, status)}")
