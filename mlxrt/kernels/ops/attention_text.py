"""The texts of attention over pages: what is done to a row's heads, how lanes meet its keys, and how parts join.

Written once, for keys and values as they are and as codes, with a new token and without: `source` puts them together.
"""

from dataclasses import dataclass

from ..registry import InlineSource
from . import attention_codes as codes
from .attention_tiles import FETCH_KEYS, FETCH_VALUES, HOLD, PLACE, STORE, TILES, WORDS
from .quantized import READ

HEAD_OF = r"""
// Which head of a QKV product vector v of a threadgroup is: its queries, the key, the value.
template <int H, int KV, int HG, bool TIED> FN uint head_of(uint v, uint h0, uint kh) {
    return v < uint(HG) ? h0 + v : v == uint(HG) || TIED ? uint(H) + kh : uint(H + KV) + kh;
}
"""
# One threadgroup: HG query heads of one key head of one row, and one part of its keys.
BEGIN = r"""
    uint lane = thread_index_in_simdgroup; uint sg = simdgroup_index_in_threadgroup;
    uint t = thread_position_in_threadgroup.x; uint nil = threadgroup_position_in_grid.z;
    uint r = threadgroup_position_in_grid.x / uint(H / HG);
    uint h0 = threadgroup_position_in_grid.x % uint(H / HG) * uint(HG);
    uint split = threadgroup_position_in_grid.y; bool last = split == uint(SPLITS - 1);
    uint kh = h0 / uint(H / KV);
    const int ROWS = CODED ? KV : 2 * KV;  // vectors of a token
    const int MADE = NEW ? HG + 2 : HG; threadgroup float vecs[HG + 2][D]; threadgroup uint newest[NEWEST];
    threadgroup float sums[SG][HG][D]; threadgroup float tops[SG][HG]; threadgroup float dens[SG][HG];
    int begin = where[3 * r]; int stop = where[3 * r + 1]; uint fresh = uint(where[3 * r + 2]); int pos = stop + int(fresh);
    int lo = WINDOW > 0 ? metal::max(begin, pos - WINDOW + 1) : begin;
    int full = stop - lo;
    const int STEP = 16; int each = (metal::max(full, 0) + SPLITS * STEP - 1) / (SPLITS * STEP) * STEP;
    int from = metal::min(lo + int(split) * each, metal::max(lo, stop));  // a short row's last part begins at its tail
    int to = last ? pos + 1 : metal::min(from + each, stop);
    // Blocks of this part of the keys: read at once, not one before every key, and by those who have no heads to turn.
    const int PART = W / SPLITS + 4 + STEP / S; const bool STAGE = PART <= 512; uint early = uint(from - begin) / uint(S);
    const int BUSY = SG > HG + 2 ? HG + 2 : 0;
    threadgroup uint blocks[STAGE ? PART : 1];
    if (STAGE && sg >= uint(BUSY)) {
        for (uint i = t - uint(BUSY * 32); i < uint(PART); i += uint((SG - BUSY) * 32)) {
            blocks[i] = early + i < uint(W) ? uint(table[r * W + early + i]) : 0;
        }
    }
    MAKE
    for (uint v = sg; v < uint(MADE); v += uint(SG)) {
        uint head = head_of<H, KV, HG, TIED>(v, h0, kh);
        float e[D / 32]; float g[D / 32]; float speed[TURN / 32 + 1]; float ss = 0.0f;
        #pragma unroll
        for (uint i = 0; i < uint(D / 32); i++) { e[i] = NUMBER; g[i] = 1.0f; }
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
        ENCODE
        for (uint i = lane; i < uint(D); i += 32) {
            float y = float(static_cast<T>(vecs[v][i])); vecs[v][i] = y;
            SPREAD;
        }
        STORE
    }
    MEANWHILE
    COPY
    threadgroup_barrier(mem_flags::mem_threadgroup);
"""
# The tail as it will be: threadgroups that share a key copy a part of its old tokens each, by simdgroups that have no heads to
# turn; one of them adds the new token.
COPY = r"""
    if (last && sg >= uint(BUSY)) {
        const uint EACH = 16 / sizeof(T); const uint CHUNKS = TAIL * D / EACH; const uint MINE = (SG - BUSY) * 32;
        for (uint i = h0 % uint(H / KV) / uint(HG) * MINE + t - uint(BUSY * 32); i < 2 * CHUNKS; i += MINE * uint(H / KV / HG)) {
            uint kv = i / CHUNKS; uint at = ((r * 2 + kv) * KV + kh) * CHUNKS + i % CHUNKS;
            if (i % CHUNKS / (D / EACH) != fresh) {
                ((device uint4*)(tail_out))[at] = ((const device uint4*)(tail))[at];
            }
        }
    }
"""
APPEND = r"""
    if (last && h0 % uint(H / KV) == 0) {
        for (uint i = t; i < uint(2 * D); i += uint(SG * 32)) {
            uint at = (((r * 2 + i / D) * KV + kh) * TAIL + fresh) * D + i % D;
            tail_out[at] = static_cast<T>(vecs[HG + i / D][i % D]);
        }
    }
"""
# A few narrow queries lie a second time, so that lanes which read together find them in different banks.
SPREAD = "if (SPREAD_OUT && v < uint(HG)) apart[v % SPREADS][i + i / 16] = y;"
HOLD_APART = r"""
    const bool SPREAD_OUT = HG * D <= 256; const uint SPREADS = SPREAD_OUT ? HG : 1; threadgroup float apart[SPREADS][SPREAD_OUT ? D + D / 16 : 1];
"""
# Lanes by themselves: for float32, for heads too wide for matrix units, and for a few short rows. A lane takes 16 numbers of
# a key and its value, U keys at a time; the next ones are on their way while it meets those it has, the first ones while
# heads are turned.
HOLD_ALONE = "    const device T* held = pool; const device T* recent = tail;\n"
TAKE = r"""
    #pragma unroll
    for (int u = 0; u < U; u++) {
        int p = near + u * KPS + mine; int key = p < to ? p : near;
        SLOT
        READ_BOTH
    }
"""
EARLY = r"""
    const int LK = D / 16; const int KPS = 32 / LK; uint part = lane % LK; int mine = int(lane) / LK;
    const int KTAKE = CODED ? KB / 2 : 4 * sizeof(T); const int VTAKE = CODED ? VB / 2 : 4 * sizeof(T);
    Both<KTAKE, VTAKE> next[U]; int near = from + int(sg) * KPS * U;
    if (near < to) {
        TAKE_BEGIN
    }
"""
ALONE = r"""
    float q[HG][16]; float all[HG]; float m[HG]; float l[HG]; float a[HG][16]; float base[HG];
    #pragma unroll
    for (int g = 0; g < HG; g++) {
        m[g] = -1e30f; l[g] = 0.0f; all[g] = 0.0f; base[g] = 0.0f;
        #pragma unroll
        for (int i = 0; i < 16; i++) {
            q[g][i] = (SPREAD_OUT ? apart[uint(g) % SPREADS][part * 17 + uint(i)] : vecs[g][part * 16 + i]) * as_type<float>(uint(SCALE)); all[g] += q[g][i]; a[g][i] = 0.0f;
        }
    }
    for (int k0 = near; k0 < to; k0 = near) {
        float kk[U][16]; float vv[U][16]; Line kf[U]; Line vf[U]; bool live[U];
        #pragma unroll
        for (int u = 0; u < U; u++) {
            int p = k0 + u * KPS + mine; live[u] = p < to;
            if (NEW && (live[u] ? p : k0) == pos) {
                FRESH
            }
            OPEN
        }
        near = k0 + SG * KPS * U;
        if (near < to) {
            TAKE_NEXT
        }
        simdgroup_barrier(mem_flags::mem_none);  // keeps compilers from waiting for them
        #pragma unroll
        for (int g = 0; g < HG; g++) {
            meet<U, LK, CAP, CODED>(q[g], all[g], kk, vv, kf, vf, live, m[g], l[g], a[g], base[g]);
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
"""
# A simdgroup's lanes weigh the simdgroups' parts, a part each, and hand the weights round.
FINISH = r"""
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = t; i < uint(HG * D); i += uint(SG * 32)) {
        uint g = i / D; uint d = i % D; bool has = lane < uint(SG);
        float mine = has ? tops[lane % SG][g] : -1e30f; float top = simd_max(mine); float o = 0.0f;
        if (SINKS && SPLITS == 1) top = metal::max(top, float(sinks[h0 + g]));
        float weight = has ? metal::exp(mine - top) : 0.0f; float den = simd_sum(has ? dens[lane % SG][g] * weight : 0.0f);
        for (uint s = 0; s < uint(SG); s++) o += sums[s][g][d] * simd_shuffle(weight, s);
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
// Word i of numbers as memory has them.
template <typename T, typename F> FN uint word_of(F numbers, uint i) {
    const uint N = 4 / sizeof(T);
    return pair_of<T>(numbers[N * i], numbers[N * i + N - 1]);
}
template <int KN, int VN> struct Both { uint k[KN]; uint v[VN]; Line kf; Line vf; };  // what a lane takes of a key and its value
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
# Which vector of the pool, or of the tail, holds a key; a value's is as far behind it as there are keys.
BLOCK = """uint page = uint(key - begin) / uint(S); uint block = NAMED;
                uint in_pool = (block * uint(ROWS) + kh) * S + uint(key) % S;"""
PAGE = BLOCK.replace("NAMED", "STAGE ? blocks[page - early] : uint(table[r * W + page])")
PAGE_EARLY = BLOCK.replace("NAMED", "uint(table[r * W + page])")  # before a barrier
SLOT = r"""bool pooled = key < stop; uint slot = (r * uint(ROWS) + kh) * TAIL + uint(key - stop);
            if (pooled) {
                PAGE
                slot = in_pool;
            }"""
READ_PLAIN = r"""
            uint behind = uint(KV) * (pooled ? uint(S) : uint(TAIL)); const device T* at = pooled ? held : recent;
            load_words<KTAKE>(at, slot * uint(LK) + part, next[u].k);
            load_words<VTAKE>(at, (slot + behind) * uint(LK) + part, next[u].v);
"""
FRESH_PLAIN = r"""
                #pragma unroll
                for (int i = 0; i < KTAKE; i++) {
                    next[u].k[i] = word_of<T>(&vecs[HG][part * 16], uint(i)); next[u].v[i] = word_of<T>(&vecs[HG + 1][part * 16], uint(i));
                }
"""
OPEN_PLAIN = r"""
            #pragma unroll
            for (int i = 0; i < KTAKE; i++) {
                unpack2<T>(next[u].k[i], &kk[u][4 / sizeof(T) * i]); unpack2<T>(next[u].v[i], &vv[u][4 / sizeof(T) * i]);
            }
"""
JOIN = InlineSource(
    "mlxrt_attend_join",
    ("parts", "sinks"),
    ("out",),
    r"""
    uint h = threadgroup_position_in_grid.x; uint t = thread_position_in_threadgroup.x;
    threadgroup float share[SPLITS];
    if (t < 32) {
        float sink = SINKS ? float(sinks[h % H]) : -1e30f; float top = sink; float den = 0.0f;
        for (uint s = t; s < uint(SPLITS); s += 32) top = metal::max(top, parts[(h * SPLITS + s) * (D + 2) + D]);
        top = simd_max(top);
        for (uint s = t; s < uint(SPLITS); s += 32) {
            uint at = (h * SPLITS + s) * (D + 2); share[s] = metal::exp(parts[at + D] - top);
            den += parts[at + D + 1] * share[s];
        }
        den = simd_sum(den);
        if (SINKS) den += metal::exp(sink - top);
        for (uint s = t; s < uint(SPLITS); s += 32) share[s] /= den;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint d = t; d < uint(D); d += uint(SIZE)) {
        float o = 0.0f;
        #pragma unroll
        for (int s = 0; s < SPLITS; s++) o += parts[(h * SPLITS + s) * (D + 2) + d] * share[s];
        out[h * D + d] = static_cast<T>(o);
    }
""",
)

# Where matrix units' words are asked for: those of codes a round ahead.
ROUND = FETCH_KEYS + FETCH_VALUES
AT_ONCE = {"FIRST": "", "NOW": PLACE + ROUND, "NEXT_KEYS": "", "NEXT_VALUES": "", "KEPT_LINES": ""}
AT_ONCE |= {"FETCH_LINES": "", "FETCH_WHOLE": ""}
AHEAD = {
    "FIRST": PLACE + "        if (near < to) {" + ROUND + "    }",
    "NOW": "",
    "NEXT_KEYS": PLACE + "        if (near < to) {" + FETCH_KEYS + "        }",
    "NEXT_VALUES": "if (near < to) {" + FETCH_VALUES + "        }",
    "KEPT_LINES": "uint lw[2][2 * G];",
    "FETCH_LINES": codes.FETCH_LINES,
    "FETCH_WHOLE": codes.FETCH_WHOLE,
}


@dataclass(frozen=True)
class Origin:
    """Where a threadgroup's heads come from."""

    inputs: tuple[str, ...]
    number: str  # what stands in the text for number lane + 32 i of head `head`, vector v
    make: str = ""  # what is done before
    helpers: str = ""
    name: str = ""


MEMORY = Origin(("qkv",), "float(qkv[(r * HEADS + head) * D + lane + 32 * i])")


def source(*, new: bool, tiled: bool, coded: bool, origin: Origin = MEMORY) -> InlineSource:
    """The kernel of one kind of call."""
    hold = codes.HOLD if coded else HOLD if tiled else HOLD_ALONE
    copy, append = (codes.COPY, codes.APPEND) if coded else (COPY, APPEND)
    begin = BEGIN.replace("ENCODE", codes.ENCODE if new and coded else "")
    begin, hold = begin.replace("SPREAD;", "" if tiled else SPREAD), hold + ("" if tiled else HOLD_APART)
    begin = begin.replace("STORE", STORE if new and tiled and not coded else "")
    begin = begin.replace("NEWEST", "D * (KB + VB) / 32" if tiled or coded else "1")
    begin = (
        begin.replace("MAKE", origin.make).replace("NUMBER", origin.number).replace("MEANWHILE", "" if tiled else EARLY)
    )
    begin = begin.replace("COPY", copy if new else "")
    text = hold + begin + (append if new else "") + (TILES if tiled else ALONE) + FINISH
    for place, what in (AHEAD if coded else AT_ONCE).items():
        text = text.replace(place, what)
    text = text.replace("TAKE_BEGIN", TAKE.replace("SLOT", SLOT.replace("PAGE", PAGE_EARLY))).replace("TAKE_NEXT", TAKE)
    text = text.replace("READ_LINES", codes.READ_LINES if coded else "").replace("SLOT", SLOT).replace("PAGE", PAGE)
    text = text.replace("READ_BOTH", codes.READ_BOTH if coded else READ_PLAIN)
    text = text.replace("OPEN", codes.OPEN if coded else OPEN_PLAIN)
    text = text.replace("FRESH", codes.FRESH if coded else FRESH_PLAIN)
    inputs = (*origin.inputs, "pool", "tail", "table", "where", "speeds", "qn", "kn", "sinks")
    helpers = (
        READ + origin.helpers + HEAD_OF + MEET + (WORDS if tiled or coded else "") + (codes.ENCODING if coded else "")
    )
    name = "mlxrt_" + origin.name + ("attend" if new else "look") + "_tiles" * tiled + "_coded" * coded
    return InlineSource(name, inputs, ("out", "tail_out") if new else ("out",), text, helpers)
