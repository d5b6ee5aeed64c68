"""The compiled CPU kernels: an op's arrays in, its arrays out.

Arrays are read where MLX has them; nothing is copied but what comes out. A call computes at once, so its inputs are
evaluated first: these kernels are no part of MLX's graphs. While a step is recorded, its calls are kept with the arrays
they read and made (engine/cpu_step.py).
"""

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from .calls import (
    FORMATS,
    ArgmaxCall,
    Arguments,
    AttentionCall,
    CallList,
    CombineCall,
    ConcatCall,
    DrawCall,
    EmbedCall,
    EncodeCall,
    ExpertsCall,
    LogprobsCall,
    MatmulCall,
    Matrix,
    NormCall,
    RouterCall,
    SortCall,
    open_library,
)

SCALE_TYPES = {mx.float32: 0, mx.float16: 1, mx.bfloat16: 2}
ACTIVATIONS = {None: 0, "silu": 1, "gelu": 2, "clamped": 3, "sigmoid": 4}


@dataclass(frozen=True)
class Pinned:
    """A matrix as C sees it, and the arrays whose memory it names."""

    matrix: Matrix
    address: int
    arrays: tuple[mx.array, ...]


@dataclass(frozen=True)
class MadeCall:
    """A call that was computed; by the names of its arguments, the arrays it read and those it made."""

    arguments: Arguments
    inputs: Mapping[str, mx.array]
    outputs: Mapping[str, mx.array]


def hold_memory(array: mx.array) -> Any:
    """An array's numbers where they lie, evaluated and without gaps, as an object that keeps them there."""
    view = memoryview(array)  # type: ignore[arg-type]  # evaluates it
    if not view.c_contiguous:
        view = memoryview(mx.contiguous(array))  # type: ignore[arg-type]
    return ctypes.c_char.from_buffer(view)


def address_of(array: mx.array) -> int:
    """Where its numbers lie, as long as somebody holds the array."""
    return ctypes.addressof(hold_memory(array))


def as_int32(array: mx.array) -> mx.array:
    return array if array.dtype == mx.int32 else array.astype(mx.int32)


def attention_call(
    kind: type[AttentionCall],
    qkv: mx.array,
    layout: Any,
    codec: Any,
    pool: mx.array,
    table: mx.array,
    row_range: mx.array,
) -> tuple[AttentionCall, dict[str, mx.array | None]]:
    """What all calls for a QKVLayout and a KV cache have, and the arrays they read."""
    pool_blocks, _, size, words = pool.shape
    bits = {name: getattr(codec, name, 0) for name in ("key_bits", "value_bits", "group")}  # plain ones have none
    call = kind(
        rows=qkv.shape[0], heads=layout.num_heads, kv_heads=layout.num_kv_heads, dim=layout.head_dim, words=words,
        pool_blocks=pool_blocks, size=size, row_blocks=table.shape[1], **bits,
        pairs=0 if layout.inv_freq is None else layout.inv_freq.shape[0],
        new_heads=qkv.shape[1] // layout.head_dim - layout.num_heads, eps=layout.eps, magnitude=layout.magnitude,
        v_norm=layout.v_norm, tied=layout.tied,
    )  # fmt: skip
    inputs: dict[str, mx.array | None] = {"qkv": qkv, "pool": pool}
    inputs |= {"table": as_int32(table), "row_range": as_int32(row_range)}
    inputs |= {"q_norm": layout.q_norm, "k_norm": layout.k_norm, "inv_freq": layout.inv_freq}
    return call, inputs


def set_scores(call: AttentionCall, scale: float, window: int | None, keep: int, softcap: float | None) -> None:
    call.scale, call.window, call.keep, call.softcap = scale, window or 0, keep, softcap or 0.0


class CpuKernels:
    """One for a model: it holds the matrices it has seen, whose memory must not move."""

    name = "cpu"

    def __init__(self, path: Path, threads: int):
        self.path, self.threads = path, threads
        self.library = open_library(str(path))
        self.vectors = self.library.mlxrt_vector_name().decode()
        self.activations = "int8" if self.library.mlxrt_activation_bits() == 8 else "float32"
        self._pinned: dict[int, Pinned] = {}
        self._made: list[MadeCall] | None = None

    @contextmanager
    def recording(self) -> Iterator[list[MadeCall]]:
        """The calls made inside, with all their arrays: none of them can take another's place in memory."""
        made: list[MadeCall] = []
        self._made = made
        try:
            yield made
        finally:
            self._made = None

    def rows_together(self, mode: str) -> int:
        """Rows side by side that the library reads a matrix of this mode as fastest; 0: as they are."""
        return self.library.mlxrt_rows_together(FORMATS[mode]) if mode in FORMATS else 0

    def run(self, calls: CallList) -> None:
        calls.run(self.library, self.threads)

    def _call(
        self, arguments: Arguments, inputs: Mapping[str, mx.array | None], outputs: Mapping[str, np.ndarray]
    ) -> list[mx.array]:
        """Run one call over these arrays; its outputs."""
        read = {name: array for name, array in inputs.items() if array is not None}
        held = {name: hold_memory(array) for name, array in read.items()}
        for name, memory in held.items():
            setattr(arguments, name, ctypes.addressof(memory))
        for name, buffer in outputs.items():
            setattr(arguments, name, buffer.ctypes.data)
        self.run(CallList([arguments]))
        made = [mx.array(buffer) for buffer in outputs.values()]
        if self._made is not None:
            self._made.append(MadeCall(arguments, read, dict(zip(outputs, made))))
        return made

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
        at = [address_of(a) for a in raw] + [None] * (3 - len(arrays))
        kind = SCALE_TYPES[arrays[matrix.mode == "affine"].dtype] if matrix.mode in ("affine", "dense") else 0
        shape = (matrix.rows, matrix.width, matrix.row_bytes, FORMATS[matrix.kind], matrix.bits, matrix.group, kind)
        made = Matrix(*at, *shape, matrix.kind != matrix.mode)
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
        activation: str | None = None,
        pair: bool = False,
        times: mx.array | None = None,
        residual: mx.array | None = None,
        softcap: float | None = None,
    ) -> mx.array:
        """The op qmv for any number of rows of x."""
        rows, outputs = x.shape[0], matrix.rows // 2 if pair else matrix.rows
        call = MatmulCall(matrix=self.pin(matrix).address, columns=rows, eps=eps, softcap=softcap or 0.0, pair=pair)
        call.activation = ACTIVATIONS[activation]
        inputs = {"x": x, "norm": norm, "bias": bias, "times": times, "residual": residual}
        return self._call(call, inputs, {"y": np.empty((rows, outputs), np.float32)})[0]

    def multiply_experts(
        self,
        x: mx.array,
        matrix: Any,
        order: mx.array,
        bounds: mx.array,
        each: int,
        activation: str | None = None,
        pair: bool = False,
        bias: mx.array | None = None,
    ) -> mx.array:
        """The op moe_grouped: rows of x by the matrices of a stack."""
        pairs, outputs = order.size, matrix.rows // 2 if pair else matrix.rows
        call = ExpertsCall(
            matrix=self.pin(matrix).address, pairs=pairs, count=matrix.weight.shape[0], each=each,
            activation=ACTIVATIONS[activation], pair=pair,
        )  # fmt: skip
        inputs = {"x": x, "order": order, "bounds": bounds, "bias": bias}
        return self._call(call, inputs, {"y": np.empty((pairs, outputs), np.float32)})[0]

    def route(
        self,
        x: mx.array,
        matrix: Any,
        k: int,
        norm: mx.array | None = None,
        eps: float = 0.0,
        bias: mx.array | None = None,
        sigmoid: bool = False,
        normalise: bool = False,
        correction: mx.array | None = None,
        scales: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:
        """The op moe_router."""
        rows = x.shape[0]
        call = RouterCall(
            matrix=self.pin(matrix).address, rows=rows, k=k, eps=eps, sigmoid=sigmoid, normalise=normalise
        )
        inputs = {"x": x, "norm": norm, "bias": bias, "correction": correction, "scales": scales}
        outputs = {"experts": np.empty((rows, k), np.uint32), "weights": np.empty((rows, k), np.float32)}
        experts, weights = self._call(call, inputs, outputs)
        return experts, weights

    def sort_pairs(self, experts: mx.array, count: int) -> tuple[mx.array, mx.array]:
        """The op moe_sort."""
        outputs = {"order": np.empty((experts.size,), np.uint32), "bounds": np.empty((count + 1,), np.uint32)}
        order, bounds = self._call(SortCall(pairs=experts.size, count=count), {"experts": experts}, outputs)
        return order, bounds

    def combine(self, parts: mx.array, weights: mx.array, residual: mx.array | None = None) -> mx.array:
        """The op moe_combine."""
        (rows, k), width = weights.shape, parts.shape[1]
        inputs = {"parts": parts, "weights": weights, "residual": residual}
        return self._call(CombineCall(rows=rows, k=k, width=width), inputs, {"y": np.empty((rows, width), np.float32)})[
            0
        ]

    def attend(
        self,
        qkv: mx.array,
        layout: Any,
        pages: Any,
        scale: float,
        window: int | None = None,
        keep: int = 0,
        softcap: float | None = None,
        sinks: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:
        """(out [R, heads * dim], the tail with the new token) of a QKVLayout and Pages, plain or quantised, in float32."""
        raw = pages.raw
        call, inputs = attention_call(AttentionCall, qkv, layout, pages.codec, raw.pool, raw.table, raw.row_range)
        set_scores(call, scale, window, keep, softcap)
        call.tail_size, inputs["sinks"] = raw.tail.shape[2], sinks
        outputs = {"out": np.empty((qkv.shape[0], layout.num_heads * layout.head_dim), np.float32)}
        if not call.new_heads:
            return self._call(call, inputs | {"tail": raw.tail}, outputs)[0], pages.tail
        out, tail = self._call(call, inputs, outputs | {"tail": np.array(raw.tail)})
        return out, pages.wrap_tail(tail)

    def attend_prefill(
        self,
        qkv: mx.array,
        layout: Any,
        pages: Any,
        scale: float,
        window: int | None = None,
        keep: int = 0,
        softcap: float | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """The op prefill_attention of a QKVLayout and PrefillPages."""
        given = qkv, layout, pages.codec, pages.raw_pool, pages.table, pages.row_range
        call, inputs = attention_call(AttentionCall, *given)
        set_scores(call, scale, window, keep, softcap)
        inputs |= {"sinks": sinks, "table_row": as_int32(pages.row)}
        outputs = {"out": np.empty((qkv.shape[0], layout.num_heads * layout.head_dim), np.float32)}
        return self._call(call, inputs, outputs)[0]

    def encode_kv(self, qkv: mx.array, layout: Any, pages: Any) -> tuple[Any, mx.array]:
        """The op of this name, by the call that extends decode tails: each token gets one of one slot."""
        rows, (_, heads, _, words) = qkv.shape[0], pages.raw_pool.shape
        call, inputs = attention_call(
            EncodeCall, qkv, layout, pages.codec, pages.raw_pool, pages.table, pages.row_range
        )
        call.tail_size = 1
        kind = np.float32 if pages.raw_pool.dtype == mx.float32 else np.uint32
        outputs = {"tail": np.empty((rows, heads, 1, words), kind), "finite": np.empty((rows,), np.bool_)}
        made, finite = self._call(call, inputs, outputs)
        return pages.wrap(made[:, :, 0]), finite

    def embed(self, matrix: Any, tokens: mx.array, scale: float = 1.0) -> mx.array:
        """[N, width]: the rows of the matrix that the tokens name, times `scale`."""
        call = EmbedCall(matrix=self.pin(matrix).address, count=tokens.size, scale=scale)
        wanted = tokens if tokens.dtype == mx.uint32 else tokens.astype(mx.uint32)
        return self._call(call, {"tokens": wanted}, {"y": np.empty((tokens.size, matrix.width), np.float32)})[0]

    def add_norm(
        self,
        x: mx.array,
        weight: mx.array,
        eps: float,
        residual: mx.array | None = None,
        scalar: mx.array | float | None = None,
        groups: int = 1,
    ) -> mx.array:
        """The op of this name."""
        held = scalar if isinstance(scalar, mx.array) else None
        scale = 1.0 if scalar is None or isinstance(scalar, mx.array) else scalar
        call = NormCall(rows=x.shape[0], width=x.shape[1], groups=groups, eps=eps, scale=scale)
        inputs = {"x": x, "weight": weight, "residual": residual, "scalar": held}
        return self._call(call, inputs, {"y": np.empty(x.shape, np.float32)})[0]

    def argmax(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """The op of this name."""
        rows, width = x.shape
        outputs = {"tokens": np.empty((rows,), np.uint32), "status": np.empty((rows, 2), np.uint32)}
        tokens, status = self._call(ArgmaxCall(rows=rows, width=width), {"x": x}, outputs)
        return tokens, status

    def draw(
        self,
        x: mx.array,
        rows: mx.array,
        offset: mx.array,
        tokens: mx.array | None = None,
        recent: mx.array | None = None,
        mask: mx.array | None = None,
    ) -> tuple[mx.array, ...]:
        """The op of this name."""
        (r, width), recents = x.shape, 0 if recent is None else recent.shape[1]
        call = DrawCall(rows=r, width=width, words=rows.shape[1], recents=recents)
        inputs = {"x": x, "table": rows, "offset": offset, "mask": mask}
        outputs = {"tokens": np.empty((r,), np.uint32), "status": np.empty((r, 2), np.uint32)}
        outputs["y"] = np.empty((r, width), np.float32)
        if recent is not None:
            inputs |= {"newest": tokens, "recent": recent}
            outputs["after"] = np.empty((r, recents), np.uint32)
        return tuple(self._call(call, inputs, outputs))

    def top_logprobs(self, x: mx.array, status: mx.array, n: int) -> tuple[mx.array, mx.array]:
        """The op of this name."""
        rows, width = x.shape
        outputs = {"result": np.empty((rows, 2 + n), np.uint32), "logprobs": np.empty((rows, 1 + n), np.float32)}
        result, logprobs = self._call(
            LogprobsCall(rows=rows, width=width, count=n), {"x": x, "status": status}, outputs
        )
        return result, logprobs

    def concat_columns(self, **parts: mx.array | None) -> mx.array:
        """The op of this name."""
        given = {name: part for name, part in parts.items() if part is not None}
        rows, widths = given["a"].shape[0], {f"{name}_width": part.shape[1] for name, part in given.items()}
        call = ConcatCall(rows=rows, **widths)
        return self._call(call, given, {"y": np.empty((rows, sum(widths.values())), np.float32)})[0]
