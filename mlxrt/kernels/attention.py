"""One token a row against its row's keys and values: paged blocks, the tail of the running batch, and the new token.

One launch does what stands between the QKV product and the output product: norms of the heads, rope, the tail with the
new token, and attention over an exact window with sinks and soft cap. Long contexts are split over threadgroups and
joined by a second launch.
"""

import mlx.core as mx

from .attention_cases import attention_cases
from .heads import Pages
from .matvec import bits_of
from .op import Source, op
from .packing import READ

WIDTHS = (64, 128, 256, 512)  # of heads


READ16 = r"""
// Sixteen numbers, part `part` of vector i of a head of D.
template <typename T, int D, typename P> FN void read16(P p, uint i, uint part, thread float* y) {
    load8<T>(p, (i * D + part * 16) / 8, y); load8<T>(p, (i * D + part * 16) / 8 + 1, y + 8);
}
"""

# One threadgroup: HG query heads of one key head of one row, and one part of its keys.
BEGIN = r"""
    uint lane = thread_index_in_simdgroup; uint sg = simdgroup_index_in_threadgroup;
    uint t = thread_position_in_threadgroup.x;
    uint r = threadgroup_position_in_grid.x / uint(H / HG);
    uint h0 = threadgroup_position_in_grid.x % uint(H / HG) * uint(HG);
    uint split = threadgroup_position_in_grid.y; bool last = split == uint(SPLITS - 1);
    uint kh = h0 / uint(H / KV);
    threadgroup float vecs[HG + 2][D];
    threadgroup float sums[SG][HG][D]; threadgroup float tops[SG][HG]; threadgroup float dens[SG][HG];
    int begin = where[3 * r]; int stop = where[3 * r + 1]; uint fresh = uint(where[3 * r + 2]); int pos = stop + int(fresh);
    int lo = WINDOW > 0 ? metal::max(begin, pos - WINDOW + 1) : begin;
    int full = stop - lo;
    int each = (metal::max(full, 0) + SPLITS - 1) / SPLITS;
    int from = metal::min(lo + int(split) * each, metal::max(lo, stop));  // a short row's last part begins at its tail
    int to = last ? pos + (NEW ? 0 : 1) : metal::min(from + each, stop);
    // Blocks of this part of the keys: read at once, not one before every key, and by those who have no heads to turn.
    const int PART = W / SPLITS + 4; const bool STAGE = PART <= 512; uint early = uint(from - begin) / uint(S);
    const int BUSY = SG > HG + 2 ? HG + 2 : 0;
    threadgroup uint blocks[STAGE ? PART : 1];
    if (STAGE && sg >= uint(BUSY)) {
        for (uint i = t - uint(BUSY * 32); i < uint(PART); i += uint((SG - BUSY) * 32)) {
            blocks[i] = early + i < uint(W) ? uint(table[r * W + early + i]) : 0;
        }
    }
    for (uint v = sg; v < uint(NEW ? HG + 2 : HG); v += uint(SG)) {
        uint head = v < uint(HG) ? h0 + v : v == uint(HG) || TIED ? uint(H) + kh : uint(H + KV) + kh;
        float e[D / 32]; float g[D / 32]; float speed[TURN / 32 + 1]; float ss = 0.0f;
        #pragma unroll
        for (uint i = 0; i < uint(D / 32); i++) { e[i] = float(qkv[(r * HEADS + head) * D + lane + 32 * i]); g[i] = 1.0f; }
        if (QN && v < uint(HG)) {
            #pragma unroll
            for (uint i = 0; i < uint(D / 32); i++) g[i] = float(qn[lane + 32 * i]);
        }
        if (KN && v == uint(HG)) {
            #pragma unroll
            for (uint i = 0; i < uint(D / 32); i++) g[i] = float(kn[lane + 32 * i]);
        }
        #pragma unroll
        for (uint i = 0; i < uint(TURN / 32 + 1); i++) speed[i] = lane + 32 * i < uint(TURN) ? float(speeds[lane + 32 * i]) : 0.0f;
        #pragma unroll
        for (uint i = 0; i < uint(D / 32); i++) ss += e[i] * e[i];
        bool normed = v < uint(HG) ? QN : v == uint(HG) ? KN : VN;
        float inv = normed ? metal::rsqrt(simd_sum(ss) / float(D) + as_type<float>(uint(EPS))) : 1.0f;
        #pragma unroll
        for (uint i = 0; i < uint(D / 32); i++) vecs[v][lane + 32 * i] = e[i] * inv * g[i];
        simdgroup_barrier(mem_flags::mem_threadgroup);
        if (v <= uint(HG)) {
            #pragma unroll
            for (uint i = 0; i < uint(TURN / 32 + 1); i++) {
                uint p = lane + 32 * i;
                if (p < uint(TURN)) {
                    float angle = float(pos) * speed[i]; float f = as_type<float>(uint(MAGNITUDE));
                    float c = metal::cos(angle) * f; float s = metal::sin(angle) * f;
                    float a = vecs[v][p]; float b = vecs[v][p + TURN];
                    vecs[v][p] = a * c - b * s; vecs[v][p + TURN] = a * s + b * c;
                }
            }
            simdgroup_barrier(mem_flags::mem_threadgroup);
        }
        for (uint i = lane; i < uint(D); i += 32) vecs[v][i] = float(static_cast<T>(vecs[v][i]));
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
"""
APPEND = r"""
    if (last && h0 % uint(H / KV) == 0) {
        const uint EACH = 16 / sizeof(T); const uint CHUNKS = TAIL * D / EACH;
        for (uint i = t; i < 2 * CHUNKS; i += uint(SG * 32)) {
            uint kv = i / CHUNKS; uint at = ((r * 2 + kv) * KV + kh) * CHUNKS + i % CHUNKS;
            if (i % CHUNKS / (D / EACH) != fresh) {
                ((device uint4*)(tail_out))[at] = ((const device uint4*)(tail))[at];
            }
        }
        for (uint i = t; i < uint(2 * D); i += uint(SG * 32)) {
            uint at = (((r * 2 + i / D) * KV + kh) * TAIL + fresh) * D + i % D;
            tail_out[at] = static_cast<T>(vecs[HG + i / D][i % D]);
        }
    }
"""
REST = r"""
    const int LK = D / 16; const int KPS = 32 / LK;
    uint part = lane % LK; int mine = int(lane) / LK;
    float q[HG][16]; float all[HG]; float m[HG]; float l[HG]; float a[HG][16]; float base[HG];
    #pragma unroll
    for (int g = 0; g < HG; g++) {
        m[g] = -1e30f; l[g] = 0.0f; all[g] = 0.0f; base[g] = 0.0f;
        #pragma unroll
        for (int i = 0; i < 16; i++) {
            q[g][i] = vecs[g][part * 16 + i] * as_type<float>(uint(SCALE)); all[g] += q[g][i]; a[g][i] = 0.0f;
        }
    }
    for (int k0 = from + int(sg) * KPS * U; k0 < to; k0 += SG * KPS * U) {
        float kk[U][16]; float vv[U][16]; Line kf[U]; Line vf[U]; bool live[U];
        #pragma unroll
        for (int u = 0; u < U; u++) {
            int p = k0 + u * KPS + mine; live[u] = p < to; int at = live[u] ? p : k0;
            READ_KEYS
        }
        #pragma unroll
        for (int g = 0; g < HG; g++) {
            meet<U, LK, CAP, CODED>(q[g], all[g], kk, vv, kf, vf, live, m[g], l[g], a[g], base[g]);
        }
    }
    if (NEW && last && sg == uint(SG - 1)) {
        float kk[1][16]; float vv[1][16]; Line none[1]; bool live[1]; live[0] = mine == 0;
        for (int i = 0; i < 16; i++) { kk[0][i] = vecs[HG][part * 16 + i]; vv[0][i] = vecs[HG + 1][part * 16 + i]; }
        for (int g = 0; g < HG; g++) {
            meet<1, LK, CAP, false>(q[g], all[g], kk, vv, none, none, live, m[g], l[g], a[g], base[g]);
        }
    }
    #pragma unroll
    for (int g = 0; g < HG; g++) {
        float top = m[g];
        #pragma unroll
        for (uint o = LK; o < 32; o *= 2) top = metal::max(top, simd_shuffle_xor(top, o));
        float f = metal::exp(m[g] - top); float den = l[g] * f;
        #pragma unroll
        for (uint o = LK; o < 32; o *= 2) den += simd_shuffle_xor(den, o);
        #pragma unroll
        for (int i = 0; i < 16; i++) {
            float v = (CODED ? a[g][i] + base[g] : a[g][i]) * f;
            #pragma unroll
            for (uint o = LK; o < 32; o *= 2) v += simd_shuffle_xor(v, o);
            if (mine == 0) sums[sg][g][part * 16 + i] = v;
        }
        if (lane == 0) { tops[sg][g] = top; dens[sg][g] = den; }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = t; i < uint(HG * D); i += uint(SG * 32)) {
        uint g = i / D; uint d = i % D;
        float top = SINKS && SPLITS == 1 ? float(sinks[h0 + g]) : -1e30f; float den = 0.0f; float o = 0.0f;
        for (int s = 0; s < SG; s++) top = metal::max(top, tops[s][g]);
        for (int s = 0; s < SG; s++) { float e = metal::exp(tops[s][g] - top); den += dens[s][g] * e; o += sums[s][g][d] * e; }
        if (SPLITS == 1) {
            if (SINKS) den += metal::exp(float(sinks[h0 + g]) - top);
            out[(r * H + h0 + g) * D + d] = static_cast<OUT>(o / den);
        } else {
            uint at = (r * H + h0 + g) * SPLITS + split;
            out[at * (D + 2) + d] = static_cast<OUT>(o);
            if (d == 0) { out[at * (D + 2) + D] = static_cast<OUT>(top); out[at * (D + 2) + D + 1] = static_cast<OUT>(den); }
        }
    }
"""
MEET = r"""
struct Line { float by; float plus; };  // a number is a code `by` that `plus` this
// U keys and values against a query, LK lanes a key: the running softmax of its numbers. CODED: sixteen numbers of a key
// are k along the line kf, which takes no time from each of them: the query's sum is `all`; likewise values, whose part
// that is the same for all sixteen gathers in `base`.
template <int U, int LK, int CAP, bool CODED> FN void meet(const thread float (&q)[16], float all, const thread float (&k)[U][16], const thread float (&v)[U][16], const thread Line (&kf)[U], const thread Line (&vf)[U], const thread bool (&live)[U], thread float& m, thread float& l, thread float (&a)[16], thread float& base) {
    float d[U]; float top = m;
    #pragma unroll
    for (int u = 0; u < U; u++) {
        d[u] = 0.0f;
        #pragma unroll
        for (int i = 0; i < 16; i++) d[u] += q[i] * k[u][i];
        if (CODED) d[u] = d[u] * kf[u].by + all * kf[u].plus;
        #pragma unroll
        for (uint o = 1; o < uint(LK); o *= 2) d[u] += simd_shuffle_xor(d[u], o);
        if (CAP != 0) d[u] = metal::tanh(d[u] / as_type<float>(uint(CAP))) * as_type<float>(uint(CAP));
        d[u] = live[u] ? d[u] : -1e30f; top = metal::max(top, d[u]);
    }
    float f = metal::exp(m - top); l *= f; base *= f; m = top;
    #pragma unroll
    for (int i = 0; i < 16; i++) a[i] *= f;
    #pragma unroll
    for (int u = 0; u < U; u++) {
        float p = live[u] ? metal::exp(d[u] - top) : 0.0f; l += p;
        if (CODED) { base += p * vf[u].plus; p *= vf[u].by; }
        #pragma unroll
        for (int i = 0; i < 16; i++) a[i] += p * v[u][i];
    }
}
"""
READS = r"""
            if (at < stop) {
                uint page = uint(at - begin) / uint(S); uint block = STAGE ? blocks[page - early] : uint(table[r * W + page]);
                uint i = (block * 2 * KV + kh) * S + uint(at) % S;
                read16<T, D>(pool, i, part, kk[u]); read16<T, D>(pool, i + KV * S, part, vv[u]);
            } else {
                uint i = (r * 2 * KV + kh) * TAIL + uint(at - stop);
                read16<T, D>(tail, i, part, kk[u]); read16<T, D>(tail, i + KV * TAIL, part, vv[u]);
            }
"""
NAMES = ("qkv", "pool", "tail", "table", "where", "speeds", "qn", "kn", "sinks")
ATTEND = Source(
    "mlxrt_attend", NAMES, ("out", "tail_out"), BEGIN + APPEND + REST.replace("READ_KEYS", READS), READ + READ16 + MEET
)
LOOK = Source(
    "mlxrt_look", NAMES, ("out",), BEGIN + REST.replace("READ_KEYS", READS), READ + READ16 + MEET
)  # reads only: there is no new token

JOIN = Source(
    "mlxrt_attend_join",
    ("parts", "sinks"),
    ("out",),
    r"""
    uint h = threadgroup_position_in_grid.x; uint t = thread_position_in_threadgroup.x;
    float top = SINKS ? float(sinks[h % H]) : -1e30f; float den = 0.0f;
    for (int s = 0; s < SPLITS; s++) top = metal::max(top, parts[(h * SPLITS + s) * (D + 2) + D]);
    for (int s = 0; s < SPLITS; s++) {
        uint at = (h * SPLITS + s) * (D + 2);
        den += parts[at + D + 1] * metal::exp(parts[at + D] - top);
    }
    if (SINKS) den += metal::exp(float(sinks[h % H]) - top);
    for (uint d = t; d < uint(D); d += uint(SIZE)) {
        float o = 0.0f;
        for (int s = 0; s < SPLITS; s++) {
            uint at = (h * SPLITS + s) * (D + 2);
            o += parts[at + d] * metal::exp(parts[at + D] - top);
        }
        out[h * D + d] = static_cast<T>(o / den);
    }
""",
)


@op(attention_cases)
def attend_pages(qkv, heads, pages, scale, window=None, softcap=None, sinks=None):
    """(out [R, queries * dim], tail with the new token): each row's token sees its row's positions up to its own."""
    base, start, used = pages.where.T
    at = start + used
    q, *new = heads.split(qkv)
    q, tail, rows = heads.turn(q, at, heads.q_norm), pages.tail, qkv.shape[0]
    if new:
        k, v = heads.turn(new[0], at, heads.k_norm), new[1]
        if heads.v_norm:
            v = mx.fast.rms_norm(v, None, heads.eps)
        here = (mx.arange(tail.shape[2]) == used[:, None])[:, None, :, None]
        tail = mx.where(here, mx.concatenate([k, v], axis=1)[:, :, None], tail)
    past = pages.pool[pages.table].transpose(0, 2, 1, 3, 4).flatten(2, 3)  # [R, 2 keys, W * size, dim]
    known = base[:, None] + mx.arange(past.shape[2])
    known = mx.where(known < start[:, None], known, mx.array(1 << 30))
    known = mx.concatenate([known, start[:, None] + mx.arange(tail.shape[2])], axis=1)
    k, v = mx.split(mx.concatenate([past, tail], axis=2).astype(mx.float32), 2, axis=1)
    seen = known <= at[:, None]
    if window is not None:
        seen = seen & (known > at[:, None] - window)
    scores = q.reshape(rows, heads.keys, -1, heads.dim).astype(mx.float32) * scale @ k.swapaxes(-1, -2)
    if softcap is not None:
        scores = mx.tanh(scores / softcap) * softcap
    scores = mx.where(seen[:, None, None], scores, -mx.inf)
    if sinks is not None:
        sink = mx.broadcast_to(sinks.astype(mx.float32).reshape(1, heads.keys, -1, 1), (*scores.shape[:-1], 1))
        scores = mx.concatenate([scores, sink], axis=-1)
    weights = mx.softmax(scores, axis=-1)[..., : k.shape[2]]
    return (weights @ v).reshape(rows, -1).astype(qkv.dtype), tail


def refuses(qkv, heads, pages, **rest) -> str | None:
    if heads.dim not in WIDTHS:
        return f"heads of {heads.dim}: {', '.join(map(str, WIDTHS))} are built"
    if qkv.dtype != pages.pool.dtype:
        return f"keys are kept as {pages.pool.dtype}, activations are {qkv.dtype}"
    if heads.queries % heads.keys:
        return f"{heads.queries} queries for {heads.keys} keys"
    return None


@attend_pages.kernel(ATTEND, LOOK, JOIN, refuses=refuses)
def launch(gpu, qkv, heads, pages, scale, window=None, softcap=None, sinks=None):
    rows, h, kv, dim = qkv.shape[0], heads.queries, heads.keys, heads.dim
    new = qkv.shape[1] > h * dim
    together, simdgroups, splits = shape_of(rows, h, kv, dim, pages)
    out = ((rows, h * dim), qkv.dtype) if splits == 1 else ((rows, h, splits, dim + 2), mx.float32)
    found = gpu(
        ATTEND if new else LOOK,
        [
            qkv,
            pages.pool,
            pages.tail,
            pages.table,
            pages.where,
            heads.speeds,
            heads.q_norm,
            heads.k_norm,
            sinks,
        ],
        (rows * h // together, splits, 1),
        32 * simdgroups,
        [out, (pages.tail.shape, pages.tail.dtype)] if new else [out],
        T=qkv.dtype,
        OUT=out[1],
        H=h,
        KV=kv,
        D=dim,
        HG=together,
        SG=simdgroups,
        U=2,
        CODED=False,
        SPLITS=splits,
        HEADS=qkv.shape[1] // dim,
        NEW=new,
        QN=heads.q_norm is not None,
        KN=heads.k_norm is not None,
        VN=heads.v_norm,
        TIED=heads.tied,
        EPS=bits_of(heads.eps),
        TURN=0 if heads.speeds is None else heads.speeds.shape[0],
        MAGNITUDE=bits_of(heads.magnitude),
        TAIL=pages.tail.shape[2],
        **seen(pages, scale, window, softcap, sinks),
    )
    return join(gpu, found[0], qkv, heads, sinks), found[1] if new else pages.tail


def seen(pages, scale, window, softcap, sinks) -> dict[str, int]:
    """Which keys count and how, as constants of the kernel."""
    cap = 0 if softcap is None else bits_of(softcap)
    form = {"SCALE": bits_of(scale), "WINDOW": window or 0, "CAP": cap, "SINKS": sinks is not None}
    return {**form, "S": pages.pool.shape[2], "W": pages.table.shape[1]}


def join(gpu, parts: mx.array, x: mx.array, heads, sinks: mx.array | None) -> mx.array:
    """Attention's output [R, queries * dim], from the parts of the keys where they were split: parts are of rank 4."""
    if parts.ndim == 2:
        return parts
    (rows, h, splits, _), dim = parts.shape, heads.dim
    sizes = {"T": x.dtype, "H": h, "D": dim, "SPLITS": splits, "SIZE": 128, "SINKS": sinks is not None}
    return gpu(JOIN, [parts, sinks], rows * h, 128, [((rows, h * dim), x.dtype)], **sizes)[0]


def shape_of(rows: int, h: int, kv: int, dim: int, pages: Pages) -> tuple[int, int, int]:
    """(query heads a threadgroup takes together, its simdgroups, parts of the keys).

    Heads that share a key head read it once if they go together; they may where enough threadgroups are left.
    """
    tokens, group = pages.table.shape[1] * pages.pool.shape[2], h // kv
    for together in (4, 2, 1):
        busy = rows * h // together
        splits = parts_of(tokens, busy)
        if together == 1 or (group % together == 0 and busy * splits >= 128):
            break
    simdgroups = 16 if together == 1 and dim <= 128 else 8
    while simdgroups * together * dim * 4 > 20480:
        simdgroups //= 2
    return together, simdgroups, splits


def parts_of(tokens: int, busy: int) -> int:
    """Parts of 1,024 keys at least, until the device is full."""
    splits = 1
    while tokens > 1024 * splits and busy * splits < 264 and splits < 64:
        splits *= 2
    return splits
