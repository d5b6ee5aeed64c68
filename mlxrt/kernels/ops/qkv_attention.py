"""Attention that makes its own heads: the QKV product and what follows it, in one launch, for one short row.

A threadgroup multiplies the rows of its query head, its key and its value; heads that share a key make it again, each for
itself. The host has one launch less to do, which is what one row waits for; the device takes longer, and too long for wide
rows (docs/decisions/0009). The rest of the text is attention's.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..dispatch import Kernels
from ..registry import Case, op
from ..testing import sample
from .attention_cases import attention_cases
from .attention_text import Origin, source
from .kv_quant import Packed
from .linear import linear
from .paged_attention import ALONE, run, seen, shape_of
from .qkv_layout import Pages, QKVLayout
from .qmv import bits_of, qmv
from .quantized import QuantizedMatrix
from .quantized_attention import PackedPages, attention_op, packed_cases
from .staging import DOT, ROOM, padded_width

WIDEST = 4096  # numbers of x: 16 KB of threadgroup memory
# Bytes of the matrix that a threadgroup multiplies by itself. On H200s in one launch and in two: with 200,000 (Qwen3-0.6B)
# 19.2 and 12.6 us of the device, 700 and 625 tok/s; with 390,000 (30B-A3B) 27.3 and 14.7 us, 323 and 278 tok/s; with 790,000
# (8B) 42.5 and 17.7 us, more than the host takes. A step that is one graph has two (Kernels.graph_mode).
MOST = 400_000

# Vectors of HG queries, a key and a value lie in `vecs`, not yet normed: a simdgroup makes every SG-th R rows of them.
MAKE = r"""
    const int N = FORM == 2 ? 8 * sizeof(T) : BITS; const uint MANY = uint(MADE * D);
    threadgroup float4 xs[TILE / 4]; threadgroup float by32[TILE / 16]; threadgroup float norms[SG];
    const int LEVELS = FORM == 3 ? 1 << BITS : 1; threadgroup float levels[LEVELS];
    lay_levels<FORM, LEVELS, SG * 32>(wl, t, &levels[0]);
    uint one = lift_of<BITS>(nil); uint row[R]; uint w0[R][N]; float s0[R]; float z0[R]; float squares = 0.0f;
    uint of = sg * uint(R);
    #pragma unroll
    for (int n = 0; n < R; n++) row[n] = head_of<H, KV, HG, TIED>(of / uint(D), h0, kh) * uint(D) + of % uint(D) + uint(n);
    load_rows<FORM, BITS, WGROUP, K>(w, ws, wz, row, lane * 32 < uint(K) ? lane * 32 : 0, w0, s0, z0);
    for (uint i = t; i < uint(TILE / 8); i += uint(SG * 32)) {
        squares += stage8<T, FORM, NORM, K>(x, r * K, wg, 0, i, &xs[0], &by32[0]);
    }
    squares = simd_sum(squares);
    if (lane == 0) norms[sg] = squares;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint a = sg * uint(R); a < MANY; a += uint(SG * R)) {
        float acc[1][R];
        #pragma unroll
        for (int n = 0; n < R; n++) acc[0][n] = 0.0f;
        for (uint j = 0; j < uint(K); j += 1024) {
            uint w1[R][N]; float s1[R]; float z1[R]; bool turn = j + 1024 >= uint(K);
            if (turn) {  // the next rows
                of = metal::min(a + uint(SG * R), MANY - uint(R));
                #pragma unroll
                for (int n = 0; n < R; n++) row[n] = head_of<H, KV, HG, TIED>(of / uint(D), h0, kh) * uint(D) + of % uint(D) + uint(n);
            }
            uint k = (turn ? 0 : j + 1024) + lane * 32;
            load_rows<FORM, BITS, WGROUP, K>(w, ws, wz, row, k < uint(K) ? k : 0, w1, s1, z1);
            simdgroup_barrier(mem_flags::mem_none);  // see qmv
            rows_meet<T, FORM, BITS, TILE / 4>(w0, s0, z0, j + lane * 32, one, &levels[0], &xs[0], &by32[0], acc);
            take_rows(w0, s0, z0, w1, s1, z1);
        }
        #pragma unroll
        for (int n = 0; n < R; n++) {
            float y = simd_sum(acc[0][n]);
            if (lane == 0) vecs[a / uint(D)][a % uint(D) + uint(n)] = y;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float inv = 1.0f;
    if (NORM) {
        float whole = 0.0f;
        for (int n = 0; n < SG; n++) whole += norms[n];
        inv = metal::rsqrt(whole / float(K) + as_type<float>(uint(WEPS)));
    }
"""
# Rounded as if it had been in memory, so that both ways are the same attention.
NUMBER = "float(static_cast<T>(vecs[v][lane + 32 * i] * inv + (BIAS ? float(bias[head * D + lane + 32 * i]) : 0.0f)))"
PRODUCT = Origin(("x", "w", "ws", "wz", "wl", "wg", "bias"), NUMBER, MAKE, DOT, "enter_")
SOURCES = {
    coded: {(new, False): source(new=new, tiled=False, coded=coded, origin=PRODUCT) for new in (True, False)}
    for coded in (False, True)
}


@dataclass(frozen=True)
class LazyQKV:
    """The arguments of a QKV projection, which attention may compute in its own launch."""

    x: mx.array
    matrix: QuantizedMatrix
    norm: mx.array | None = None
    eps: float = 0.0
    bias: mx.array | None = None


def compute_qkv(qkv: LazyQKV | mx.array, kernels: Kernels) -> mx.array:
    """[N, heads * dim]."""
    if isinstance(qkv, mx.array):
        return qkv
    return linear(kernels, qkv.x, qkv.matrix, norm=qkv.norm, eps=qkv.eps, bias=qkv.bias)


def decode_attention(
    kernels: Kernels, qkv: LazyQKV | mx.array, pages: Pages | PackedPages, **attention: Any
) -> tuple[mx.array, mx.array]:
    """Decode attention of one token per row over paged keys and values: (out [R, queries * dim], the new tail).

    The QKV projection is fused into it, if that is faster: captured in a graph it is not, since a launch costs nothing.
    """
    if isinstance(qkv, LazyQKV) and not kernels.graph_mode:
        product = {"x": qkv.x, "matrix": qkv.matrix, "norm": qkv.norm, "eps": qkv.eps, "bias": qkv.bias}
        out, tail = kernels.run(qkv_attention, **product, pages=pages, **attention)
    else:
        out, tail = kernels.run(attention_op(pages), qkv=compute_qkv(qkv, kernels), pages=pages, **attention)
    return out, tail.words if isinstance(tail, Packed) else tail


def qkv_cases(dtype: mx.Dtype) -> Iterator[Case]:
    kinds: list[tuple[Any, ...]] = [
        ("affine", 4, 64, 128, {"norm": True}),
        ("affine", 8, 32, 1056, {"norm": True, "bias": True}),
        ("mxfp4", 4, 32, 96, {}),
        ("dense", 16, 32, 1024, {"norm": True}),
        ("affine", 5, 32, 64, {"bias": True}),
        ("affine", 4, 32, 2080, {"norm": True}),
        ("codes", 3, 0, 160, {}),
    ]
    # Four of the short ones: the others differ in how keys are met, which is attention's own text.
    plain, coded = short(attention_cases(dtype))[:4], short(packed_cases(dtype))
    for i, (mode, bits, group, width, extra) in enumerate(kinds):
        case = plain[i % len(plain)]
        rows, outs = case.arrays["qkv"].shape
        mx.random.seed(outs + width)
        matrix = sample(mode, (outs, width), dtype, bits, group)
        arrays = {"x": mx.random.normal((rows, width)).astype(dtype)}
        if extra.get("norm"):
            arrays["norm"] = (1 + 0.1 * mx.random.normal((width,))).astype(dtype)
        if extra.get("bias"):
            arrays["bias"] = mx.random.normal((outs,)).astype(dtype)
        yield entered(case, f"{mode}{bits} of {width}", arrays, matrix)
    for case in coded:  # the same codes whatever the order of sums: products of few small whole numbers
        rows, outs = case.arrays["qkv"].shape
        weight = (mx.random.randint(-64, 64, (outs, 96)) / 16).astype(dtype)
        x = mx.broadcast_to(mx.arange(96) % 61 == 7, (rows, 96)).astype(dtype)
        yield entered(case, "whole numbers", {"x": x}, QuantizedMatrix(weight))


def short(cases: Iterator[Case]) -> list[Case]:
    return [c for c in cases if c.arrays["qkv"].shape[0] <= 3 and tokens_of(c.options["pages"]) <= ALONE]


def entered(case: Case, name: str, arrays: dict[str, mx.array], matrix: QuantizedMatrix) -> Case:
    """A case of attention, whose heads come from a product."""
    rest = {name: a for name, a in case.arrays.items() if name != "qkv"}
    return Case(f"{case.name}; {name}", rest | arrays, case.options | {"matrix": matrix, "eps": 1e-6})


def tokens_of(pages: Pages | PackedPages) -> int:
    return pages.table.shape[1] * pages.words.pool.shape[2]


def unfused(kernels, x, matrix, pages, norm=None, eps=0.0, bias=None, **attention):
    qkv = linear(kernels, x, matrix, norm=norm, eps=eps, bias=bias)
    return kernels.run(attention_op(pages), qkv=qkv, pages=pages, **attention)


@op(qkv_cases, unfused=unfused)
def qkv_attention(x, matrix, heads, pages, scale, norm=None, eps=0.0, bias=None, window=None, softcap=None, sinks=None):
    """qmv, then paged_attention or quantized_paged_attention: (out [R, queries * dim], the tail with the new token)."""
    qkv = qmv.reference(x, matrix, norm, eps, bias)
    return attention_op(pages).reference(qkv, heads, pages, scale, window, softcap, sinks)


def unsupported(x, matrix, heads, pages, norm=None, **rest) -> str | None:
    return matrix.unsupported(x, norm) or attention_op(pages).unsupported(x, heads, pages)


def memory(x: mx.array, matrix: QuantizedMatrix, heads: QKVLayout, pages: Pages | PackedPages) -> int:
    """Bytes of threadgroup memory, nearly: what x, the vectors and the simdgroups' results take, and the blocks."""
    coded, blocks = isinstance(pages, PackedPages), pages.table.shape[1]
    together, simdgroups, *_ = shape_of(
        x.shape[0], heads.queries, heads.keys, heads.dim, tokens_of(pages), False, coded, True
    )
    codes = 4 * heads.dim if coded else 0
    numbers = (
        padded_width(matrix.width) * 17 // 16 + (together + 2 + simdgroups * together) * heads.dim + blocks + codes
    )
    spread = 272 if together * heads.dim <= 256 else 0
    return 4 * (numbers + spread + 256)


def is_faster(x, matrix, heads, pages, **rest) -> bool:
    """Not where several launches would be needed anyway, or rows of the matrix be read again for each of x."""
    alone = x.shape[0] == 1 and tokens_of(pages) <= ALONE and matrix.width <= WIDEST
    made = (3 if matrix.rows > heads.queries * heads.dim else 1) * heads.dim * matrix.width
    return alone and made * matrix.bits // 8 <= MOST and memory(x, matrix, heads, pages) <= ROOM


@qkv_attention.kernel(
    *(s for kinds in SOURCES.values() for s in kinds.values()), unsupported=unsupported, is_faster=is_faster
)
def launch(gpu, x, matrix, heads, pages, scale, norm=None, eps=0.0, bias=None, window=None, softcap=None, sinks=None):
    held, coded = matrix.constants(), isinstance(pages, PackedPages)
    form = seen(scale, window, softcap, sinks) | pages.form()
    form |= {
        "FORM": held["FORM"],
        "BITS": held["BITS"],
        "WGROUP": held["GROUP"],
        "K": matrix.width,
        "TILE": padded_width(matrix.width),
    }
    form |= {"NORM": norm is not None, "WEPS": bits_of(eps) if norm is not None else 0, "BIAS": bias is not None}
    form["R"] = (4 if matrix.bits <= 4 else 2) if matrix.packed else 1  # a head's rows are a whole number of these
    begins = [x, *matrix.inputs(), norm, bias]
    out, *new = run(gpu, SOURCES[coded], begins, x, matrix.rows, heads, pages.words, sinks, form, entering=True)
    return out, pages.kept(new[0]) if new else pages.tail
