"""Attention over keys and values kept as codes: one launch turns, encodes and appends the new token, one attends.

Codes are MLX's affine ones, made by the same rule as mx.quantize. Attention is the text of attention.py; only how
sixteen numbers are read differs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .attention import BEGIN, JOIN, MEET, REST, WIDTHS, join, seen, shape_of
from .attention import attend_pages as plain_attention
from .heads import Heads, Pages
from .matvec import bits_of
from .op import Case, Source, op
from .packing import READ

BITS = (2, 4, 8)  # of which sixteen numbers are whole words
Coded = tuple[mx.array, ...]  # words, scales, biases


@dataclass(frozen=True)
class PackedPages:
    """Where rows' coded keys and values lie: [blocks or R, keys, slots, width] each."""

    keys: Coded
    values: Coded
    tail_keys: Coded
    tail_values: Coded
    table: mx.array  # [R, W]
    where: mx.array  # [R, 3] as in Pages
    key_bits: int
    value_bits: int
    group: int

    @property
    def pool(self) -> mx.array:
        return self.keys[0]

    @property
    def tails(self) -> tuple[mx.array, ...]:
        return (*self.tail_keys, *self.tail_values)

    def plain(self, coded: Coded, bits: int) -> mx.array:
        words, scales, biases = coded
        return mx.dequantize(words, scales, biases, self.group, bits)


# One simdgroup a head: of the queries, the keys, then the values.
TURN_BODY = r"""
    uint lane = thread_index_in_simdgroup;
    uint r = threadgroup_position_in_grid.x / uint(HEADS); uint h = threadgroup_position_in_grid.x % uint(HEADS);
    threadgroup float vec[D]; threadgroup uint codes[D];
    uint slot = uint(where[3 * r + 2]); int pos = where[3 * r + 1] + int(slot);
    float e[D / 32]; float ss = 0.0f;
    for (uint i = 0; i < uint(D / 32); i++) {
        e[i] = float(qkv[(r * HEADS + h) * D + lane + 32 * i]); ss += e[i] * e[i];
    }
    bool query = h < uint(H); bool key = !query && h < uint(H + KV);
    float inv = (query && QN) || (key && KN) ? metal::rsqrt(simd_sum(ss) / float(D) + as_type<float>(uint(EPS))) : 1.0f;
    for (uint i = 0; i < uint(D / 32); i++) {
        float g = QN && query ? float(qn[lane + 32 * i]) : KN && key ? float(kn[lane + 32 * i]) : 1.0f;
        vec[lane + 32 * i] = e[i] * inv * g;
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    if (query || key) {
        for (uint p = lane; p < uint(TURN); p += 32) {
            float angle = float(pos) * float(speeds[p]); float f = as_type<float>(uint(MAGNITUDE));
            float c = metal::cos(angle) * f; float s = metal::sin(angle) * f;
            float a = vec[p]; float b = vec[p + TURN];
            vec[p] = a * c - b * s; vec[p + TURN] = a * s + b * c;
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
    }
    if (query) {
        for (uint i = lane; i < uint(D); i += 32) q[(r * H + h) * D + i] = static_cast<T>(vec[i]);
    } else if (key) {
        append<T, D, GROUP, KB, TAIL>(vec, codes, lane, (r * KV + h - H) * TAIL, slot, tkw, tks, tkz, kw, ks, kz);
    } else {
        append<T, D, GROUP, VB, TAIL>(vec, codes, lane, (r * KV + h - H - KV) * TAIL, slot, tvw, tvs, tvz, vw, vs, vz);
    }
"""
APPEND = r"""
// A head's tail with one more token: its numbers in `vec` become codes, group by group, as mx.quantize makes them.
template <typename T, int D, int GROUP, int BITS, int TAIL, typename V, typename C, typename W, typename S, typename WO, typename SO>
FN void append(V vec, C codes, uint lane, uint first, uint slot, W w, S s, S z, WO wo, SO so, SO zo) {
    const float bins = float((1u << BITS) - 1u);
    for (uint g = 0; g < uint(D / GROUP); g++) {
        float lo = vec[g * GROUP + lane]; float hi = lo;
        for (uint i = lane + 32; i < uint(GROUP); i += 32) {
            lo = metal::min(lo, vec[g * GROUP + i]); hi = metal::max(hi, vec[g * GROUP + i]);
        }
        lo = -simd_max(-lo); hi = simd_max(hi);
        bool low = metal::abs(lo) > metal::abs(hi);
        float scale = metal::max((hi - lo) / bins, 1e-7f);
        scale = low ? scale : -scale;
        float edge = low ? lo : hi; float steps = metal::rint(edge / scale); float zero = 0.0f;
        if (steps != 0.0f) { scale = edge / steps; zero = edge; }
        for (uint i = lane; i < uint(GROUP); i += 32) {
            float c = metal::rint((vec[g * GROUP + i] - zero) / scale);
            codes[g * GROUP + i] = uint(metal::min(metal::max(c, 0.0f), bins));
        }
        if (lane == 0) {
            so[(first + slot) * (D / GROUP) + g] = static_cast<T>(scale);
            zo[(first + slot) * (D / GROUP) + g] = static_cast<T>(zero);
        }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    const uint WORDS = D * BITS / 32; const uint EACH = 32 / BITS;
    for (uint i = lane; i < TAIL * WORDS; i += 32) {
        uint word = 0;
        if (i / WORDS == slot) {
            for (uint c = 0; c < EACH; c++) word |= codes[i % WORDS * EACH + c] << (c * BITS);
        } else {
            word = w[first * WORDS + i];
        }
        wo[first * WORDS + i] = word;
    }
    for (uint i = lane; i < uint(TAIL * (D / GROUP)); i += 32) {
        if (i / (D / GROUP) != slot) {
            so[first * (D / GROUP) + i] = s[first * (D / GROUP) + i]; zo[first * (D / GROUP) + i] = z[first * (D / GROUP) + i];
        }
    }
}
"""
TAILS = ("tkw", "tks", "tkz", "tvw", "tvs", "tvz")
TURN = Source(
    "mlxrt_turn_append",
    ("qkv", *TAILS, "where", "speeds", "qn", "kn"),
    ("q", "kw", "ks", "kz", "vw", "vs", "vz"),
    TURN_BODY,
    APPEND,
)
READ_CODES = r"""
// Sixteen numbers, part `part` of coded vector i of a head of D: each is y along the line that comes back.
template <int BITS, int GROUP, int D, typename W, typename S>
FN Line read_codes(W w, S s, S z, uint i, uint part, uint nil, thread float (&y)[16]) {
    uint p[BITS / 2]; uint at = (i * D + part * 16) / 16 * (BITS / 2); uint one = lift_of<BITS>(nil);
    if (BITS == 8) {
        auto v = ((const device uint4*)(w))[at / 4];
        p[0] = v.x; p[1 % (BITS / 2)] = v.y; p[2 % (BITS / 2)] = v.z; p[3 % (BITS / 2)] = v.w;
    } else {
        #pragma unroll
        for (int c = 0; c < BITS / 2; c++) p[c] = w[at + c];
    }
    Line f; f.by = float(s[(i * D + part * 16) / GROUP]);
    f.plus = zero_at<0, BITS>(z, (i * D + part * 16) / GROUP, f.by);
    #pragma unroll
    for (int n = 0; n < 16; n++) y[n] = lifted<BITS>(p, n, one);
    return f;
}
"""
READS = r"""
            if (at < stop) {
                uint page = uint(at - begin) / uint(S); uint block = STAGE ? blocks[page - early] : uint(table[r * W + page]);
                uint i = (block * KV + kh) * S + uint(at) % S;
                kf[u] = read_codes<KB, GROUP, D>(kw, ks, kz, i, part, nil, kk[u]);
                vf[u] = read_codes<VB, GROUP, D>(vw, vs, vz, i, part, nil, vv[u]);
            } else {
                uint i = (r * KV + kh) * TAIL + uint(at - stop);
                kf[u] = read_codes<KB, GROUP, D>(tkw, tks, tkz, i, part, nil, kk[u]);
                vf[u] = read_codes<VB, GROUP, D>(tvw, tvs, tvz, i, part, nil, vv[u]);
            }
"""
LOOK = Source(
    "mlxrt_look_packed",
    (
        "qkv",
        "kw",
        "ks",
        "kz",
        "vw",
        "vs",
        "vz",
        *TAILS,
        "table",
        "where",
        "speeds",
        "qn",
        "kn",
        "sinks",
    ),
    ("out",),
    "    uint nil = threadgroup_position_in_grid.z;" + BEGIN + REST.replace("READ_KEYS", READS),
    READ + MEET + READ_CODES,
)


def packed_cases(dtype: mx.Dtype) -> Iterator[Case]:
    shapes: list[tuple[Any, ...]] = [
        (1, 4, 2, 64, 8, 3, [19], 3, (8, 8), 32, {"norms": True, "turning": 32}),
        (2, 2, 1, 128, 32, 2, [40, 33], 0, (4, 4), 64, {"turning": 64, "window": 20, "sinks": True}),
        (2, 4, 1, 128, 16, 4, [50, 7], 15, (8, 4), 128, {"turning": 32, "softcap": 5.0}),
        (2, 2, 1, 64, 32, 80, [2500, 5], 6, (4, 2), 32, {"turning": 16, "magnitude": 1.3}),
    ]
    for rows, h, kv, dim, size, blocks, start, used, bits, group, extra in shapes:
        mx.random.seed(dim + blocks)

        def coded(count, slots, width, heads=kv, dim=dim, group=group):
            return mx.quantize(mx.random.normal((count, heads, slots, dim)).astype(dtype), group, width)

        many = rows * blocks + 1
        base = [s // size * size - (blocks - 1) * size if s >= blocks * size else 0 for s in start]
        pages = PackedPages(
            coded(many, size, bits[0]),
            coded(many, size, bits[1]),
            coded(rows, 16, bits[0]),
            coded(rows, 16, bits[1]),
            mx.random.permutation(mx.arange(1, many)).reshape(rows, blocks).astype(mx.int32),
            mx.array([[b, s, used] for b, s in zip(base, start)]),
            bits[0],
            bits[1],
            group,
        )
        norms = (
            [1 + 0.2 * mx.random.normal((dim,)).astype(dtype) for _ in range(2)] if extra.get("norms") else [None] * 2
        )
        speeds = 10000.0 ** -(mx.arange(extra["turning"]) / extra["turning"])
        heads = Heads(h, kv, dim, norms[0], norms[1], False, 1e-6, speeds, extra.get("magnitude", 1.0))
        arrays = {"qkv": mx.random.normal((rows, (h + 2 * kv) * dim)).astype(dtype)}
        if extra.get("sinks"):
            arrays["sinks"] = mx.random.normal((h,)).astype(dtype)
        options = {"heads": heads, "pages": pages, "scale": dim**-0.5}
        options |= {k: v for k, v in extra.items() if k in ("window", "softcap")}
        yield Case(f"{bits} bits, {h}/{kv} heads of {dim}, {rows} rows of {start}", arrays, options)


@op(packed_cases)
def attend_packed(qkv, heads, pages, scale, window=None, softcap=None, sinks=None):
    """(out [R, queries * dim], the six arrays of the tail with the new token)."""
    used = pages.where[:, 2]
    at = pages.where[:, 1] + used
    q, k, v = heads.split(qkv)
    k = heads.turn(k, at, heads.k_norm)
    here = (mx.arange(pages.tail_keys[0].shape[2]) == used[:, None])[:, None, :, None]
    coded = (*mx.quantize(k, pages.group, pages.key_bits), *mx.quantize(v, pages.group, pages.value_bits))
    tails = tuple(mx.where(here, new[:, :, None], old) for new, old in zip(coded, pages.tails))
    plain = [
        mx.concatenate([pages.plain(k, pages.key_bits), pages.plain(v, pages.value_bits)], axis=1)
        for k, v in ((pages.keys, pages.values), (tails[:3], tails[3:]))
    ]
    read = Pages(plain[0], plain[1], pages.table, pages.where)
    q = heads.turn(q, at, heads.q_norm).flatten(1)
    turned = Heads(heads.queries, heads.keys, heads.dim)
    out, _ = plain_attention.reference(q, turned, read, scale, window, softcap, sinks)
    return out, tails


def refuses(qkv, heads, pages, **rest) -> str | None:
    if heads.dim not in WIDTHS:
        return f"heads of {heads.dim}: {', '.join(map(str, WIDTHS))} are built"
    if {pages.key_bits, pages.value_bits} - set(BITS):
        return f"keys and values of {pages.key_bits} and {pages.value_bits} bits"
    if heads.v_norm or heads.tied or qkv.shape[1] != (heads.queries + 2 * heads.keys) * heads.dim:
        return "values that are normed, shared or the keys themselves"
    if pages.keys[1].dtype != qkv.dtype:
        return f"scales are {pages.keys[1].dtype}, activations {qkv.dtype}"
    return None


@attend_packed.kernel(TURN, LOOK, JOIN, refuses=refuses)
def launch(gpu, qkv, heads, pages, scale, window=None, softcap=None, sinks=None):
    rows, h, kv, dim, dtype = qkv.shape[0], heads.queries, heads.keys, heads.dim, qkv.dtype
    given = [heads.speeds, heads.q_norm, heads.k_norm]
    coded = {"T": dtype, "H": h, "KV": kv, "D": dim, "GROUP": pages.group, "TAIL": pages.tails[0].shape[2]}
    coded |= {"KB": pages.key_bits, "VB": pages.value_bits}
    q, *tails = gpu(
        TURN,
        [qkv, *pages.tails, pages.where, *given],
        rows * (h + 2 * kv),
        32,
        [((rows, h * dim), dtype), *((a.shape, a.dtype) for a in pages.tails)],
        **coded,
        HEADS=h + 2 * kv,
        QN=heads.q_norm is not None,
        KN=heads.k_norm is not None,
        EPS=bits_of(heads.eps),
        TURN=0 if heads.speeds is None else heads.speeds.shape[0],
        MAGNITUDE=bits_of(heads.magnitude),
    )
    together, simdgroups, splits = shape_of(rows, h, kv, dim, pages)
    out = ((rows, h * dim), dtype) if splits == 1 else ((rows, h, splits, dim + 2), mx.float32)
    [found] = gpu(
        LOOK,
        [q, *pages.keys, *pages.values, *tails, pages.table, pages.where, None, None, None, sinks],
        (rows * h // together, splits, 1),
        32 * simdgroups,
        [out],
        **coded,
        OUT=out[1],
        HG=together,
        SG=simdgroups,
        U=2,
        CODED=True,
        SPLITS=splits,
        HEADS=h,
        NEW=False,
        QN=False,
        KN=False,
        VN=False,
        TIED=False,
        EPS=0,
        TURN=0,
        MAGNITUDE=0,
        **seen(pages, scale, window, softcap, sinks),
    )
    return join(gpu, found, q, heads, sinks), tuple(tails)
