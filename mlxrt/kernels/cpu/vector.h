/* Sixteen floats and sixteen bytes, by AVX-512, AVX2, NEON or plain C.
 *
 * The only file that knows instructions. Every way to add floats computes the same bits: lanes are fused multiply-adds, and
 * `sum` adds them in one order. Where bytes have dot products (HAS_DOT), dot.h multiplies by them. */
#ifndef MLXRT_VECTOR_H
#define MLXRT_VECTOR_H
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
/* Before a loop over accumulators: one that is left as a loop keeps them in memory. */
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#define UNROLL_ALL UNROLL
#define UNROLL_TWICE _Pragma("clang loop unroll_count(2)")
#else
#define UNROLL _Pragma("GCC unroll 8")
#define UNROLL_ALL _Pragma("GCC unroll 32")
#define UNROLL_TWICE _Pragma("GCC unroll 2")
#endif

/* Nothing in memory is read earlier: compilers that read everything first run out of registers. */
#define KEEP_ORDER __asm__ volatile("" ::: "memory")

/* Sixteen codes of `bits` bits lie in 2 * bits bytes: which bytes a lane reads, and how far it shifts them. */
#define BYTE(i, bits, b) ((i) * (bits) / 8 + (b) < 16 ? (i) * (bits) / 8 + (b) : 15)
#define SHIFT(i, bits) ((i) * (bits) % 8)
#define LANE(i, bits) BYTE(i, bits, 0), BYTE(i, bits, 1), BYTE(i, bits, 2), BYTE(i, bits, 3)
#define LANES4(i, bits) LANE(i, bits), LANE(i + 1, bits), LANE(i + 2, bits), LANE(i + 3, bits)
#define SHIFTS4(i, bits) SHIFT(i, bits), SHIFT(i + 1, bits), SHIFT(i + 2, bits), SHIFT(i + 3, bits)
#define FOR_BITS(DO) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8)
#define NO_TABLE {0}

static const int8_t code_bytes[9][64] __attribute__((aligned(64))) = {NO_TABLE
#define TABLE(bits) , {LANES4(0, bits), LANES4(4, bits), LANES4(8, bits), LANES4(12, bits)}
    FOR_BITS(TABLE)
#undef TABLE
};
static const int32_t code_shifts[9][16] __attribute__((aligned(64))) = {NO_TABLE
#define TABLE(bits) , {SHIFTS4(0, bits), SHIFTS4(4, bits), SHIFTS4(8, bits), SHIFTS4(12, bits)}
    FOR_BITS(TABLE)
#undef TABLE
};

#define PAIR(i, bits) BYTE(i, bits, 0), BYTE(i, bits, 1)
#define PAIRS4(i, bits) PAIR(i, bits), PAIR(i + 1, bits), PAIR(i + 2, bits), PAIR(i + 3, bits)
static const uint8_t code_pairs[9][32] __attribute__((aligned(64), unused)) = {NO_TABLE
#define TABLE(bits) , {PAIRS4(0, bits), PAIRS4(4, bits), PAIRS4(8, bits), PAIRS4(12, bits)}
    FOR_BITS(TABLE)
#undef TABLE
};
static const int16_t pair_shifts[9][16] __attribute__((aligned(64), unused)) = {NO_TABLE
#define TABLE(bits) , {SHIFTS4(0, bits), SHIFTS4(4, bits), SHIFTS4(8, bits), SHIFTS4(12, bits)}
    FOR_BITS(TABLE)
#undef TABLE
};

INLINE float half_to_float(uint16_t h) {
    _Float16 f;
    memcpy(&f, &h, 2);
    return (float)f;
}

INLINE float bfloat_to_float(uint16_t h) {
    uint32_t w = (uint32_t)h << 16;
    float f;
    memcpy(&f, &w, 4);
    return f;
}

#if defined(__AVX512F__) && defined(__AVX512BW__)
#include <immintrin.h>
#define VECTOR_NAME "AVX-512"
enum { TILE_ROWS = 4, TILE_COLUMNS = 6 }; /* accumulators that fit the registers */
typedef __m512 floats;
typedef __m128i bytes;

INLINE floats zeros(void) { return _mm512_setzero_ps(); }
INLINE floats all(float x) { return _mm512_set1_ps(x); }
INLINE floats load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void store(float *p, floats v) { _mm512_storeu_ps(p, v); }
INLINE floats multiply(floats a, floats b) { return _mm512_mul_ps(a, b); }
INLINE floats add(floats a, floats b) { return _mm512_add_ps(a, b); }
INLINE floats multiply_add(floats a, floats b, floats c) { return _mm512_fmadd_ps(a, b, c); }
INLINE floats load_float16(const uint8_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE floats load_bfloat16(const uint8_t *p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
INLINE floats from_bytes(bytes b) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(b)); }
INLINE floats from_codes(bytes b, int bits) {
    __m512i spread = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(b), _mm512_load_si512(code_bytes[bits]));
    spread = _mm512_srlv_epi32(spread, _mm512_load_si512(code_shifts[bits]));
    return _mm512_cvtepi32_ps(_mm512_and_si512(spread, _mm512_set1_epi32((1 << bits) - 1)));
}
INLINE float sum(floats v) {
    __m256 h = _mm256_add_ps(_mm512_castps512_ps256(v), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1)));
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}

#define HAS_LOOKUP 1
INLINE bytes look_up_bytes(bytes table, bytes indices) { return _mm_shuffle_epi8(table, indices); }
INLINE floats counting(void) { return _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0); }
/* 32 codes of four bits lie in four words of eight. Words are shifted side by side, each by its lane's own count: lane
 * 4s + w of the first half has code 8w + s, of the second half code 8w + 4 + s. `table`: what a code stands for; of an index
 * the low four bits count. */
INLINE floats look_up(const uint8_t *p, int half, floats table) {
    const __m512i words = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)p));
    const __m512i first = _mm512_set_epi32(12, 12, 12, 12, 8, 8, 8, 8, 4, 4, 4, 4, 0, 0, 0, 0);
    const __m512i second = _mm512_set_epi32(28, 28, 28, 28, 24, 24, 24, 24, 20, 20, 20, 20, 16, 16, 16, 16);
    return _mm512_permutexvar_ps(_mm512_srlv_epi32(words, half ? second : first), table);
}
/* 32 numbers in that order, which may be written where they are; and back. */
INLINE void order_columns(const float *from, float *to) {
    const __m512 a = _mm512_loadu_ps(from), b = _mm512_loadu_ps(from + 16);
    const __m512i first = _mm512_set_epi32(27, 19, 11, 3, 26, 18, 10, 2, 25, 17, 9, 1, 24, 16, 8, 0);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(4));
    _mm512_storeu_ps(to, _mm512_permutex2var_ps(a, first, b));
    _mm512_storeu_ps(to + 16, _mm512_permutex2var_ps(a, second, b));
}
INLINE void restore_columns(float *x) {
    float kept[32];
    memcpy(kept, x, sizeof kept);
    for (int i = 0; i < 32; i++) x[i] = kept[i % 8 / 4 * 16 + i % 4 * 4 + i / 8];
}

#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#define VECTOR_NAME "AVX2"
enum { TILE_ROWS = 2, TILE_COLUMNS = 3 };
typedef struct { __m256 a, b; } floats;
typedef __m128i bytes;

INLINE floats zeros(void) { return (floats){_mm256_setzero_ps(), _mm256_setzero_ps()}; }
INLINE floats all(float x) { return (floats){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE floats load(const float *p) { return (floats){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE void store(float *p, floats v) { _mm256_storeu_ps(p, v.a), _mm256_storeu_ps(p + 8, v.b); }
INLINE floats multiply(floats a, floats b) { return (floats){_mm256_mul_ps(a.a, b.a), _mm256_mul_ps(a.b, b.b)}; }
INLINE floats add(floats a, floats b) { return (floats){_mm256_add_ps(a.a, b.a), _mm256_add_ps(a.b, b.b)}; }
INLINE floats multiply_add(floats a, floats b, floats c) {
    return (floats){_mm256_fmadd_ps(a.a, b.a, c.a), _mm256_fmadd_ps(a.b, b.b, c.b)};
}
INLINE __m256 half_of_bfloat16(const uint8_t *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}
INLINE floats load_bfloat16(const uint8_t *p) { return (floats){half_of_bfloat16(p), half_of_bfloat16(p + 16)}; }
#ifdef __F16C__
INLINE floats load_float16(const uint8_t *p) {
    return (floats){_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 16)))};
}
#else
#define LOADS_FLOAT16 0
#endif
INLINE floats from_bytes(bytes b) {
    return (floats){_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(b)),
                    _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_unpackhi_epi64(b, b)))};
}
INLINE bytes look_up_bytes(bytes table, bytes indices) { return _mm_shuffle_epi8(table, indices); }
INLINE __m256 half_of_codes(__m256i b, int bits, int half) {
    b = _mm256_shuffle_epi8(b, _mm256_load_si256((const __m256i *)(code_bytes[bits] + 32 * half)));
    b = _mm256_srlv_epi32(b, _mm256_load_si256((const __m256i *)(code_shifts[bits] + 8 * half)));
    return _mm256_cvtepi32_ps(_mm256_and_si256(b, _mm256_set1_epi32((1 << bits) - 1)));
}
INLINE floats from_codes(bytes b, int bits) {
    __m256i twice = _mm256_broadcastsi128_si256(b);
    return (floats){half_of_codes(twice, bits, 0), half_of_codes(twice, bits, 1)};
}
INLINE float sum(floats v) {
    __m256 h = _mm256_add_ps(v.a, v.b);
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}

#elif defined(__ARM_NEON) && defined(__aarch64__)
#include <arm_neon.h>
#define VECTOR_NAME "NEON"
enum { TILE_ROWS = 2, TILE_COLUMNS = 3 };
typedef struct { float32x4_t v[4]; } floats;
typedef uint8x16_t bytes;
#define EACH(expression) \
    for (int i = 0; i < 4; i++) r.v[i] = expression; \
    return r

INLINE floats all(float x) { floats r; EACH(vdupq_n_f32(x)); }
INLINE floats zeros(void) { return all(0); }
INLINE floats load(const float *p) { floats r; EACH(vld1q_f32(p + 4 * i)); }
INLINE void store(float *p, floats v) { for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, v.v[i]); }
INLINE floats multiply(floats a, floats b) { floats r; EACH(vmulq_f32(a.v[i], b.v[i])); }
INLINE floats add(floats a, floats b) { floats r; EACH(vaddq_f32(a.v[i], b.v[i])); }
INLINE floats multiply_add(floats a, floats b, floats c) { floats r; EACH(vfmaq_f32(c.v[i], a.v[i], b.v[i])); }
INLINE floats load_float16(const uint8_t *p) { floats r; EACH(vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p + 8 * i)))); }
INLINE floats load_bfloat16(const uint8_t *p) {
    floats r;
    EACH(vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(p + 8 * i)), 16)));
}
INLINE floats from_bytes(bytes b) {
    uint16x8_t low = vmovl_u8(vget_low_u8(b)), high = vmovl_high_u8(b);
    return (floats){{vcvtq_f32_u32(vmovl_u16(vget_low_u16(low))), vcvtq_f32_u32(vmovl_high_u16(low)),
                     vcvtq_f32_u32(vmovl_u16(vget_low_u16(high))), vcvtq_f32_u32(vmovl_high_u16(high))}};
}
INLINE bytes look_up_bytes(bytes table, bytes indices) { return vqtbl1q_u8(table, indices); }
INLINE floats from_codes(bytes b, int bits) {
    floats r;
    const uint32x4_t mask = vdupq_n_u32((1u << bits) - 1);
    for (int i = 0; i < 4; i++) {
        uint32x4_t lanes = vreinterpretq_u32_u8(vqtbl1q_u8(b, vld1q_u8((const uint8_t *)code_bytes[bits] + 16 * i)));
        lanes = vshlq_u32(lanes, vnegq_s32(vld1q_s32(code_shifts[bits] + 4 * i)));
        r.v[i] = vcvtq_f32_u32(vandq_u32(lanes, mask));
    }
    return r;
}
INLINE float sum(floats v) {
    float32x4_t q = vaddq_f32(vaddq_f32(v.v[0], v.v[2]), vaddq_f32(v.v[1], v.v[3]));
    float32x2_t d = vadd_f32(vget_low_f32(q), vget_high_f32(q));
    return vget_lane_f32(d, 0) + vget_lane_f32(d, 1);
}
#undef EACH

#ifdef __ARM_FEATURE_DOTPROD
#define HAS_DOT 1
typedef int32x4_t four_ints;
typedef float32x4_t four_floats;
/* Four sums of four products of signed bytes each. In assembly because compilers copy one zero for all sums: that costs
 * as much as a dot product, to clear a register is free. */
INLINE four_ints first_dots(bytes a, bytes b) {
    four_ints sums;
    __asm__("movi %0.2d, #0\n\tsdot %0.4s, %1.16b, %2.16b" : "=&w"(sums) : "w"(a), "w"(b));
    return sums;
}
INLINE four_ints add_dots(four_ints sums, bytes a, bytes b) {
    return vdotq_s32(sums, vreinterpretq_s8_u8(a), vreinterpretq_s8_u8(b));
}
/* The same where `rows` has four bytes of each of four rows: their sums of products with four bytes of `column`, the first four
 * or the next ones. A lane is a row's, and nothing is added across lanes. */
#define ADD_LANE_DOTS(sums, rows, column, k) \
    vdotq_laneq_s32(sums, vreinterpretq_s8_u8(rows), vreinterpretq_s8_u8(column), k)
INLINE four_ints first_lane_dots(bytes rows, bytes column) {
    four_ints sums;
    __asm__("movi %0.2d, #0\n\tsdot %0.4s, %1.16b, %2.4b[0]" : "=&w"(sums) : "w"(rows), "w"(column));
    return sums;
}
/* Sixteen bytes of each of four rows, to four of each, the next four ... */
INLINE void interleave_rows(bytes a, bytes b, bytes c, bytes d, bytes to[4]) {
    const uint32x4_t v[4] = {vreinterpretq_u32_u8(a), vreinterpretq_u32_u8(b), vreinterpretq_u32_u8(c), vreinterpretq_u32_u8(d)};
    for (int i = 0; i < 2; i++) {
        const uint64x2_t low = vreinterpretq_u64_u32(i ? vtrn2q_u32(v[0], v[1]) : vtrn1q_u32(v[0], v[1]));
        const uint64x2_t high = vreinterpretq_u64_u32(i ? vtrn2q_u32(v[2], v[3]) : vtrn1q_u32(v[2], v[3]));
        to[i] = vreinterpretq_u8_u64(vtrn1q_u64(low, high)), to[2 + i] = vreinterpretq_u8_u64(vtrn2q_u64(low, high));
    }
}
INLINE four_ints sum_each(four_ints a, four_ints b, four_ints c, four_ints d) {
    return vpaddq_s32(vpaddq_s32(a, b), vpaddq_s32(c, d));
}
INLINE four_ints times_256(four_ints v) { return vshlq_n_s32(v, 8); }
INLINE four_ints add_to_256_times(four_ints a, four_ints b) { return vaddq_s32(times_256(a), b); }
/* The largest magnitude of some numbers, not finite if one of them is not: floats without sign are ordered as integers. */
INLINE float largest_magnitude(const float *x, int count) {
    uint32x4_t largest = vdupq_n_u32(0);
    for (int i = 0; i < count; i += 4) largest = vmaxq_u32(largest, vreinterpretq_u32_f32(vabsq_f32(vld1q_f32(x + i))));
    const uint32_t bits = vmaxvq_u32(largest);
    float found;
    memcpy(&found, &bits, 4);
    return found;
}
/* Four numbers times a factor as integers. */
INLINE four_ints round_scaled(const float *x, float factor) { return vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x), factor)); }
INLINE four_ints add_ints(four_ints a, four_ints b) { return vaddq_s32(a, b); }
INLINE int32_t sum_ints(four_ints v) { return vaddvq_s32(v); }
/* The lowest digit of sixteen integers, a signed byte, and what is left of them. */
INLINE bytes take_digit(four_ints q[4]) {
    const int16x8_t low = vuzp1q_s16(vreinterpretq_s16_s32(q[0]), vreinterpretq_s16_s32(q[1]));
    const int16x8_t high = vuzp1q_s16(vreinterpretq_s16_s32(q[2]), vreinterpretq_s16_s32(q[3]));
    for (int i = 0; i < 4; i++) q[i] = vrshrq_n_s32(q[i], 8);
    return vuzp1q_u8(vreinterpretq_u8_s16(low), vreinterpretq_u8_s16(high));
}
INLINE bytes even_bytes(bytes a, bytes b) { return vuzp1q_u8(a, b); }
INLINE bytes odd_bytes(bytes a, bytes b) { return vuzp2q_u8(a, b); }
INLINE four_floats to_floats(four_ints v) { return vcvtq_f32_s32(v); }
INLINE four_floats scaled(four_floats v, float factor) { return vmulq_n_f32(v, factor); }
INLINE four_floats add_products(four_floats a, four_floats b, four_floats sums) { return vfmaq_f32(sums, a, b); }
INLINE four_floats add_scaled(four_floats a, float factor, four_floats sums) { return vfmaq_n_f32(sums, a, factor); }
/* Float16 numbers of four rows, side by side or apart. */
INLINE four_floats load_halves(const uint8_t *from) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(from))); }
INLINE four_floats read_halves(const uint8_t *const from[4]) {
    uint16_t h[4];
    for (int r = 0; r < 4; r++) memcpy(h + r, from[r], 2);
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(h)));
}
/* Sixteen unsigned bytes of each of four rows, to the first of each, the second ..., plus 2^23: a float whose last bits are
 * a byte's is made by moving the byte, which is much faster than a conversion. */
enum { BYTES_FROM = 1 << 23 };
INLINE void transpose_bytes(const bytes from[4], four_floats to[16]) {
    static const uint8_t lanes[4][16] = {
#define LANES(k) {4 * k, 255, 255, 255, 4 * k + 1, 255, 255, 255, 4 * k + 2, 255, 255, 255, 4 * k + 3, 255, 255, 255}
        LANES(0), LANES(1), LANES(2), LANES(3)
#undef LANES
    };
    uint16x8_t low[2], high[2];
    for (int i = 0; i < 2; i++) {
        low[i] = vreinterpretq_u16_u8(vzip1q_u8(from[2 * i], from[2 * i + 1]));
        high[i] = vreinterpretq_u16_u8(vzip2q_u8(from[2 * i], from[2 * i + 1]));
    }
    const uint16x8_t all[4] = {vzip1q_u16(low[0], low[1]), vzip2q_u16(low[0], low[1]),
                               vzip1q_u16(high[0], high[1]), vzip2q_u16(high[0], high[1])};
    const uint8x16_t exponent = vreinterpretq_u8_u32(vdupq_n_u32(0x4b000000));
    for (int i = 0; i < 16; i++)
        to[i] = vreinterpretq_f32_u8(vorrq_u8(vqtbl1q_u8(vreinterpretq_u8_u16(all[i / 4]), vld1q_u8(lanes[i % 4])), exponent));
}
/* Four floats of each of four rows, to the first of each, the second ... */
INLINE void transpose_four(const float *const from[4], four_floats to[4]) {
    four_floats v[4], pair[4];
    for (int i = 0; i < 4; i++) v[i] = vld1q_f32(from[i]);
    for (int i = 0; i < 4; i += 2) pair[i] = vtrn1q_f32(v[i], v[i + 1]), pair[i + 1] = vtrn2q_f32(v[i], v[i + 1]);
    for (int i = 0; i < 2; i++) {
        const float64x2_t low = vreinterpretq_f64_f32(pair[i]), high = vreinterpretq_f64_f32(pair[2 + i]);
        to[i] = vreinterpretq_f32_f64(vtrn1q_f64(low, high)), to[2 + i] = vreinterpretq_f32_f64(vtrn2q_f64(low, high));
    }
}
/* Sixteen codes of 2, 3, 5 or 6 bits as bytes. */
INLINE bytes spread_codes(bytes b, int bits) {
    uint16x8_t half[2];
    for (int i = 0; i < 2; i++) {
        half[i] = vreinterpretq_u16_u8(vqtbl1q_u8(b, vld1q_u8(code_pairs[bits] + 16 * i)));
        half[i] = vshlq_u16(half[i], vnegq_s16(vld1q_s16(pair_shifts[bits] + 8 * i)));
    }
    return vandq_u8(vuzp1q_u8(vreinterpretq_u8_u16(half[0]), vreinterpretq_u8_u16(half[1])), vdupq_n_u8((1 << bits) - 1));
}
#endif

#else
#define VECTOR_NAME "plain C"
enum { TILE_ROWS = 1, TILE_COLUMNS = 1 };
typedef struct { float v[16]; } floats;
typedef struct { uint8_t v[16]; } bytes;
#define EACH(expression) \
    for (int i = 0; i < 16; i++) r.v[i] = expression; \
    return r

INLINE floats all(float x) { floats r; EACH(x); }
INLINE floats zeros(void) { return all(0); }
INLINE floats load(const float *p) { floats r; EACH(p[i]); }
INLINE void store(float *p, floats v) { memcpy(p, v.v, 64); }
INLINE floats multiply(floats a, floats b) { floats r; EACH(a.v[i] * b.v[i]); }
INLINE floats add(floats a, floats b) { floats r; EACH(a.v[i] + b.v[i]); }
INLINE floats multiply_add(floats a, floats b, floats c) { floats r; EACH(fmaf(a.v[i], b.v[i], c.v[i])); }
INLINE floats load_bfloat16(const uint8_t *p) {
    uint16_t h[16];
    memcpy(h, p, 32);
    floats r;
    EACH(bfloat_to_float(h[i]));
}
#define LOADS_FLOAT16 0
INLINE floats from_bytes(bytes b) { floats r; EACH((float)b.v[i]); }
INLINE bytes look_up_bytes(bytes table, bytes indices) { bytes r; EACH(table.v[indices.v[i]]); }
INLINE floats from_codes(bytes b, int bits) {
    floats r;
    for (int i = 0; i < 16; i++) {
        uint32_t lane = 0;
        for (int k = 0; k < 4; k++) lane |= (uint32_t)b.v[code_bytes[bits][4 * i + k]] << (8 * k);
        r.v[i] = (float)(lane >> code_shifts[bits][i] & ((1u << bits) - 1));
    }
    return r;
}
INLINE float sum(floats v) {
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) v.v[i] += v.v[i + half];
    return v.v[0];
}
#undef EACH
#endif

#ifdef LOADS_FLOAT16
INLINE floats load_float16(const uint8_t *p) {
    uint16_t h[16];
    float f[16];
    memcpy(h, p, 32);
    for (int i = 0; i < 16; i++) f[i] = half_to_float(h[i]);
    return load(f);
}
#endif
#ifndef HAS_DOT
#define HAS_DOT 0
#endif
#ifndef HAS_LOOKUP
#define HAS_LOOKUP 0
INLINE floats counting(void) { return zeros(); }
INLINE floats look_up(const uint8_t *p, int half, floats table) { return (void)p, (void)half, table; }
INLINE void order_columns(const float *from, float *to) { (void)from, (void)to; }
INLINE void restore_columns(float *x) { (void)x; }
#endif

/* e to the x by a polynomial, to the last bit or two: compilers make vectors of loops over it, but not of the library's. */
INLINE float exponential(float x) {
    x = x < -87 ? -87 : x > 88 ? 88 : x; /* a float's normal range; what is no number stays none */
    const float n = x == x ? rintf(x * 1.44269504f) : 0;
    const float r = fmaf(n, 1.90465421e-9f, fmaf(n, -0.693147182f, x));
    float p = 1.98756915e-4f;
    p = fmaf(p, r, 1.39819995e-3f), p = fmaf(p, r, 8.33345191e-3f), p = fmaf(p, r, 4.16657959e-2f);
    p = fmaf(p, r, 1.66666655e-1f), p = fmaf(p, r, 5.00000012e-1f);
    const int32_t bits = ((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return fmaf(p, r * r, r + 1) * power;
}

/* to[r][c] = the sum of s[TILE_ROWS * c + r], for TILE_ROWS c and so many r; `to` has rows of `stride` numbers. */
INLINE void store_sums(const floats *s, int rows, float *to, int64_t stride) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
    if (rows > 1) { /* the additions of `sum`, those of all side by side */
        __m512 v[16];
        for (int i = 0; i < 16; i += 2) {
            const __m512 a = s[i], b = s[i + 1];
            v[i / 2] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
        }
        for (int i = 0; i < 8; i += 2)
            v[i / 2] = _mm512_add_ps(_mm512_shuffle_f32x4(v[i], v[i + 1], 0x88), _mm512_shuffle_f32x4(v[i], v[i + 1], 0xdd));
        for (int i = 0; i < 4; i += 2)
            v[i / 2] = _mm512_add_ps(_mm512_shuffle_ps(v[i], v[i + 1], 0x44), _mm512_shuffle_ps(v[i], v[i + 1], 0xee));
        v[0] = _mm512_add_ps(_mm512_shuffle_ps(v[0], v[1], 0x88), _mm512_shuffle_ps(v[0], v[1], 0xdd));
        float own[16];
        store(own, v[0]);
        for (int r = 0; r < rows; r++) memcpy(to + r * stride, own + 4 * r, 16);
        return;
    }
#endif
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < TILE_ROWS; c++) to[r * stride + c] = sum(s[TILE_ROWS * c + r]);
}

/* Rows side by side, a lane for each (lanes.h): LANES of them, or none where bytes have no dot products. */
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#define LANES 16
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define LANES 8
#elif HAS_DOT
#define LANES 4
#else
#define LANES 0
#endif

#if LANES
typedef int32_t lane_ints __attribute__((vector_size(4 * LANES)));
typedef float lane_floats __attribute__((vector_size(4 * LANES)));
typedef uint8_t lane_bytes __attribute__((vector_size(4 * LANES))); /* four of each row */
/* ADD_FOUR: to each lane the products of its four bytes with four signed ones from `at` + 4 * k on, k from 0 to 3. The lane's
 * have at most seven bits, with 16 lanes eight. lane_numbers, lane_halves: a byte, signed or not, or a float16 of each row. */
#if LANES == 16
#define ADD_FOUR(sums, rows, at, k) (lane_ints)_mm512_dpbusd_epi32((__m512i)(sums), (__m512i)(rows), _mm512_set1_epi32(four_bytes((at) + 4 * (k))))
INLINE lane_floats lane_numbers(const uint8_t *p, int is_signed) {
    const __m128i b = _mm_loadu_si128((const __m128i *)p);
    return (lane_floats)_mm512_cvtepi32_ps(is_signed ? _mm512_cvtepi8_epi32(b) : _mm512_cvtepu8_epi32(b));
}
INLINE lane_floats lane_halves(const uint8_t *p) { return (lane_floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE lane_floats all_lanes(float x) { return (lane_floats)_mm512_set1_ps(x); }
INLINE lane_floats to_lane_floats(lane_ints v) { return (lane_floats)_mm512_cvtepi32_ps((__m512i)v); }
INLINE lane_floats add_lane_products(lane_floats a, lane_floats b, lane_floats sums) { return (lane_floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sums); }
#elif LANES == 8
/* Sums of two products fit 16 bits. */
#ifdef __AVXVNNI__
#define ADD_FOUR(sums, rows, at, k) (lane_ints)_mm256_dpbusd_avx_epi32((__m256i)(sums), (__m256i)(rows), _mm256_set1_epi32(four_bytes((at) + 4 * (k))))
#else
#define ADD_FOUR(sums, rows, at, k) \
    ((sums) + (lane_ints)_mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)(rows), _mm256_set1_epi32(four_bytes((at) + 4 * (k)))), _mm256_set1_epi16(1)))
#endif
INLINE lane_floats lane_numbers(const uint8_t *p, int is_signed) {
    const __m128i b = _mm_loadl_epi64((const __m128i *)p);
    return (lane_floats)_mm256_cvtepi32_ps(is_signed ? _mm256_cvtepi8_epi32(b) : _mm256_cvtepu8_epi32(b));
}
INLINE lane_floats lane_halves(const uint8_t *p) { return (lane_floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
INLINE lane_floats all_lanes(float x) { return (lane_floats)_mm256_set1_ps(x); }
INLINE lane_floats to_lane_floats(lane_ints v) { return (lane_floats)_mm256_cvtepi32_ps((__m256i)v); }
INLINE lane_floats add_lane_products(lane_floats a, lane_floats b, lane_floats sums) { return (lane_floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sums); }
#else
#define ADD_FOUR(sums, rows, at, k) (lane_ints)vdotq_laneq_s32((int32x4_t)(sums), (int8x16_t)(rows), vld1q_s8(at), k)
INLINE lane_floats lane_numbers(const uint8_t *p, int is_signed) {
    uint32_t four;
    memcpy(&four, p, 4);
    const uint8x8_t b = vreinterpret_u8_u32(vdup_n_u32(four));
    if (is_signed) return (lane_floats)vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(b)))));
    return (lane_floats)vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(b))));
}
INLINE lane_floats lane_halves(const uint8_t *p) { return (lane_floats)vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))); }
INLINE lane_floats all_lanes(float x) { return (lane_floats)vdupq_n_f32(x); }
INLINE lane_floats to_lane_floats(lane_ints v) { return (lane_floats)vcvtq_f32_s32((int32x4_t)v); }
INLINE lane_floats add_lane_products(lane_floats a, lane_floats b, lane_floats sums) { return (lane_floats)vfmaq_f32((float32x4_t)sums, (float32x4_t)a, (float32x4_t)b); }
#endif
INLINE int32_t four_bytes(const int8_t *p) {
    int32_t four;
    memcpy(&four, p, 4);
    return four;
}
INLINE lane_bytes load_lanes(const uint8_t *p) {
    lane_bytes v;
    memcpy(&v, p, sizeof v);
    return v;
}
#endif

/* Bytes as one would write them in C; what compilers make of it is one instruction each. */
typedef uint8_t byte_vector __attribute__((vector_size(16)));
INLINE byte_vector load_bytes(const uint8_t *p) {
    byte_vector v;
    memcpy(&v, p, 16);
    return v;
}
typedef uint64_t long_vector __attribute__((vector_size(16)));
INLINE byte_vector load_half(const uint8_t *p) { /* eight bytes, then zeros */
    uint64_t low;
    memcpy(&low, p, 8);
    return (byte_vector)(long_vector){low, 0};
}
INLINE bytes to_bytes(byte_vector v) {
    bytes b;
    memcpy(&b, &v, 16);
    return b;
}
INLINE byte_vector look_up_codes(byte_vector table, byte_vector indices) { /* of four bits */
    const bytes found = look_up_bytes(to_bytes(table), to_bytes(indices));
    byte_vector v;
    memcpy(&v, &found, 16);
    return v;
}
#endif
