// Metal's spellings for CUDA's compiler, so that one kernel source runs on both.
// Threadgroups are one-dimensional in all our kernels: a lane is the low five bits of threadIdx.x.
#define device
#define constant
#define thread
#define threadgroup __shared__
#define FN __device__ inline
typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned char uchar;
typedef unsigned long ulong;
typedef unsigned int atomic_uint;
#define FLOAT16 __half
#define BFLOAT16 __nv_bfloat16
#define thread_index_in_simdgroup (threadIdx.x & 31u)
#define simdgroup_index_in_threadgroup (threadIdx.x >> 5)
#define thread_position_in_threadgroup threadIdx
#define threadgroup_position_in_grid blockIdx
#define threads_per_threadgroup blockDim
#define threadgroups_per_grid gridDim

namespace mem_flags {
constexpr int mem_none = 0;
constexpr int mem_threadgroup = 0;
constexpr int mem_device = 1;
}  // namespace mem_flags

constexpr int memory_order_relaxed = 0;

FN uint atomic_load_explicit(const uint* p, int) {
    return *p;
}

FN void atomic_store_explicit(uint* p, uint v, int) {
    *p = v;
}

FN uint atomic_fetch_add_explicit(uint* p, uint v, int) {
    return atomicAdd(p, v);
}

FN uint atomic_fetch_or_explicit(uint* p, uint v, int) {
    return atomicOr(p, v);
}

FN uint atomic_fetch_min_explicit(uint* p, uint v, int) {
    return atomicMin(p, v);
}

FN uint atomic_fetch_max_explicit(uint* p, uint v, int) {
    return atomicMax(p, v);
}

// Rounded, whatever is done with it then.
FN float multiply(float a, float b) {
    return __fmul_rn(a, b);
}

FN void threadgroup_barrier(int) {
    __syncthreads();
}

FN void simdgroup_barrier(int) {
    __syncwarp();
}

FN float simd_shuffle_xor(float v, uint m) {
    return __shfl_xor_sync(0xffffffffu, v, m);
}

FN uint simd_shuffle_xor(uint v, uint m) {
    return __shfl_xor_sync(0xffffffffu, v, m);
}

FN int simd_shuffle_xor(int v, uint m) {
    return __shfl_xor_sync(0xffffffffu, v, m);
}

FN float simd_shuffle(float v, uint l) {
    return __shfl_sync(0xffffffffu, v, l);
}

FN uint simd_shuffle(uint v, uint l) {
    return __shfl_sync(0xffffffffu, v, l);
}

FN float simd_sum(float v) {
    for (int o = 16; o > 0; o >>= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
    return v;
}

FN float simd_max(float v) {
    for (int o = 16; o > 0; o >>= 1) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, o));
    return v;
}
#if __CUDA_ARCH__ >= 800
FN uint simd_max(uint v) {
    return __reduce_max_sync(0xffffffffu, v);
}

FN uint simd_min(uint v) {
    return __reduce_min_sync(0xffffffffu, v);
}
#else
FN uint simd_max(uint v) {
    for (int o = 16; o > 0; o >>= 1) v = max(v, __shfl_xor_sync(0xffffffffu, v, o));
    return v;
}

FN uint simd_min(uint v) {
    for (int o = 16; o > 0; o >>= 1) v = min(v, __shfl_xor_sync(0xffffffffu, v, o));
    return v;
}
#endif
template <typename A>
FN A as_type(uint u);

template <>
FN float as_type<float>(uint u) {
    return __uint_as_float(u);
}

template <typename A>
FN A as_type(float f);

template <>
FN uint as_type<uint>(float f) {
    return __float_as_uint(f);
}

namespace metal {
FN float exp(float a) {
    return __expf(a);
}

FN float log(float a) {
    return __logf(a);
}

FN float rsqrt(float a) {
    return rsqrtf(a);
}

// Angles of rope: whole turns are taken off in three steps, exactly enough up to a million radians. CUDA's own functions
// bring hundreds of instructions for angles of any size, which a kernel of ten microseconds waits for.
FN float within(float a) {
    float k = rintf(a * 0.15915494f);
    return fmaf(k, -1.0253376e-11f, fmaf(k, -0.0019353072f, fmaf(k, -6.28125f, a)));
}

FN float cos(float a) {
    return __cosf(within(a));
}

FN float sin(float a) {
    return __sinf(within(a));
}

FN float exp2(float a) {
    return exp2f(a);
}

FN float tanh(float a) {
    return tanhf(a);
}

FN float fma(float a, float b, float c) {
    return fmaf(a, b, c);
}

FN float max(float a, float b) {
    return fmaxf(a, b);
}

FN float min(float a, float b) {
    return fminf(a, b);
}

FN float rint(float a) {
    return rintf(a);
}

FN float abs(float a) {
    return fabsf(a);
}

FN uint min(uint a, uint b) {
    return a < b ? a : b;
}

FN uint max(uint a, uint b) {
    return a > b ? a : b;
}

FN ulong min(ulong a, ulong b) {
    return a < b ? a : b;
}

FN int min(int a, int b) {
    return a < b ? a : b;
}

FN int max(int a, int b) {
    return a > b ? a : b;
}
}  // namespace metal

// Where a lane's two numbers of an 8x8 tile lie in the tensor cores' 16x8x8 product.
FN uint left_row(uint lane, uint i) {
    return lane >> 2;
}

FN uint left_col(uint lane, uint i) {
    return (lane & 3u) * 2 + i;
}

FN uint right_row(uint lane, uint i) {
    return (lane & 3u) * 2 + i;
}

FN uint right_col(uint lane, uint i) {
    return lane >> 2;
}

FN uint sum_row(uint lane, uint i) {
    return lane >> 2;
}

FN uint sum_col(uint lane, uint i) {
    return (lane & 3u) * 2 + i;
}

// Which lane has a number of such a sum, and what all rows of its column come to.
FN uint sum_lane(uint row, uint col) {
    return row * 4 + col / 2;
}

// Which lane of the same row of a left tile has its columns 2q and 2q + 1.
FN uint row_lane(uint lane, uint q) {
    return (lane & 28u) + q;
}

FN float rows_max(float v) {
    for (int o = 4; o < 32; o *= 2) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, o));
    return v;
}

FN float rows_sum(float v) {
    for (int o = 4; o < 32; o *= 2) v += __shfl_xor_sync(0xffffffffu, v, o);
    return v;
}

template <typename T>
struct alignas(2 * sizeof(T)) Tile {
    T e[2];
};

template <typename T>
FN void set(Tile<T>& t, uint i, T v) {
    t.e[i] = v;
}

template <typename T>
FN T at(Tile<T>& t, uint i) {
    return t.e[i];
}

FN uint tile_bits(__half a, __half b) {
    return uint(__half_as_ushort(a)) | (uint(__half_as_ushort(b)) << 16);
}

FN uint tile_bits(__nv_bfloat16 a, __nv_bfloat16 b) {
    return uint(__bfloat16_as_ushort(a)) | (uint(__bfloat16_as_ushort(b)) << 16);
}

// d0 += l0 r and d1 += l1 r in one instruction: two 8x8 tiles are the 16 rows the tensor cores take.
FN void multiply2(
    Tile<float>& d0, Tile<float>& d1, Tile<__half>& l0, Tile<__half>& l1, Tile<__half>& r
) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
        "{%0,%1,%2,%3};"
        : "+f"(d0.e[0]), "+f"(d0.e[1]), "+f"(d1.e[0]), "+f"(d1.e[1])
        : "r"(tile_bits(l0.e[0], l0.e[1])), "r"(tile_bits(l1.e[0], l1.e[1])),
          "r"(tile_bits(r.e[0], r.e[1]))
    );
}

FN void multiply2(
    Tile<float>& d0, Tile<float>& d1, Tile<__nv_bfloat16>& l0, Tile<__nv_bfloat16>& l1,
    Tile<__nv_bfloat16>& r
) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
        "{%0,%1,%2,%3};"
        : "+f"(d0.e[0]), "+f"(d0.e[1]), "+f"(d1.e[0]), "+f"(d1.e[1])
        : "r"(tile_bits(l0.e[0], l0.e[1])), "r"(tile_bits(l1.e[0], l1.e[1])),
          "r"(tile_bits(r.e[0], r.e[1]))
    );
}

// Both, for two tiles each that follow one another, d0 += l0 r + m0 s and d1 += l1 r + m1 s, in one instruction.
#define MULTIPLY4(T, NAME)                                                                   \
    FN void multiply4(                                                                       \
        Tile<float>& d0, Tile<float>& d1, Tile<T>& l0, Tile<T>& l1, Tile<T>& r, Tile<T>& m0, \
        Tile<T>& m1, Tile<T>& s                                                              \
    ) {                                                                                      \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." NAME "." NAME                  \
                     ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"            \
                     : "+f"(d0.e[0]), "+f"(d0.e[1]), "+f"(d1.e[0]), "+f"(d1.e[1])            \
                     : "r"(tile_bits(l0.e[0], l0.e[1])), "r"(tile_bits(l1.e[0], l1.e[1])),   \
                       "r"(tile_bits(m0.e[0], m0.e[1])), "r"(tile_bits(m1.e[0], m1.e[1])),   \
                       "r"(tile_bits(r.e[0], r.e[1])), "r"(tile_bits(s.e[0], s.e[1])));      \
    }
MULTIPLY4(__half, "f16")
MULTIPLY4(__nv_bfloat16, "bf16")

// Right tiles 4c ... 4c + 3 of a slab (../metal/slab.h).
template <typename T>
FN void load_right4(const uint4* slab, uint lane, int c, Tile<T> (&t)[4]) {
    uint4 v = slab[c * 32 + (lane ^ (2 * c))];
    *(uint*)(&t[0].e[0]) = v.x;
    *(uint*)(&t[1].e[0]) = v.y;
    *(uint*)(&t[2].e[0]) = v.z;
    *(uint*)(&t[3].e[0]) = v.w;
}

// The lower, or the upper, halves of two words.
FN uint low_halves(uint a, uint b) {
    return __byte_perm(a, b, 0x5410);
}

FN uint high_halves(uint a, uint b) {
    return __byte_perm(a, b, 0x7632);
}

// The lower, or the upper, half of a word, twice.
FN uint repeat_half(uint v, uint upper) {
    return __byte_perm(v, v, 0x1010 + upper * 0x2222);
}

FN uint4 four_words(uint a, uint b, uint c, uint d) {
    return make_uint4(a, b, c, d);
}

// A word that holds two numbers, into a tile.
template <typename T>
FN void set_pair(Tile<T>& t, uint w) {
    *(uint*)(&t.e[0]) = w;
}

// Quantized values k of both halves of a word into a tile. In the last bits of 1024 a value reads as 1024 + value << at: one
// instruction takes it out of there, so values of one byte need no shifts of their own.
template <int BITS>
FN void set_quantized(Tile<__half>& t, uint w, uint k) {
    uint at = BITS * k % 8;
    uint u = BITS * k < 8 ? w : w >> 8;
    u = (u & (((1u << BITS) - 1u) * 0x10001u << at)) | 0x64006400u;
    if (BITS == 8) u = __byte_perm(w, 0x64646464u, k == 0 ? 0x4240u : 0x4341u);
    __half2 by = __float2half2_rn(1.0f / float(1u << at));
    __half2 plus = __float2half2_rn(-1024.0f / float(1u << at));
    *(__half2*)(&t.e[0]) = __hfma2(*(__half2*)(&u), by, plus);
}

template <int BITS>
FN void set_quantized(Tile<__nv_bfloat16>& t, uint w, uint k) {
    uint u = w >> (BITS * k);
    uint mask = (1u << BITS) - 1u;
    t.e[0] = __float2bfloat16(float(u & mask));
    t.e[1] = __float2bfloat16(float((u >> 16) & mask));
}

template <typename T>
FN uint pack_pair(float a, float b);

template <>
FN uint pack_pair<float>(float a, float b) {
    return __float_as_uint(a);
}

template <>
FN uint pack_pair<__half>(float a, float b) {
    return tile_bits(__float2half(a), __float2half(b));
}

template <>
FN uint pack_pair<__nv_bfloat16>(float a, float b) {
    return tile_bits(__float2bfloat16(a), __float2bfloat16(b));
}

FN float4 four(float a, float b, float c, float d) {
    return make_float4(a, b, c, d);
}

template <typename T>
FN void unpack2(uint u, float* y);

template <>
FN void unpack2<float>(uint u, float* y) {
    y[0] = __uint_as_float(u);
}

template <>
FN void unpack2<__half>(uint u, float* y) {
    y[0] = __half2float(__ushort_as_half((unsigned short)(u & 0xffffu)));
    y[1] = __half2float(__ushort_as_half((unsigned short)(u >> 16)));
}

template <>
FN void unpack2<__nv_bfloat16>(uint u, float* y) {
    y[0] = __uint_as_float(u << 16);
    y[1] = __uint_as_float(u & 0xffff0000u);
}

// a b + c of the two numbers of a word, each rounded once.
FN uint fma_pair(__nv_bfloat16, uint a, uint b, uint c) {
    uint d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

FN uint fma_pair(__half, uint a, uint b, uint c) {
    uint d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// Values p and p + 4 of eight of four bits, times a scale plus a zero that are packed twice in a word, into a tile. In the last
// bits of 128, or of a half's 1024, a value of four bits adds itself to that number, which is then taken away again.
// The last argument is always 0, but no compiler knows it: a mask and a constant in a register are one instruction.
template <typename T>
FN void set_affine4(Tile<T>& t, uint word, int p, uint scale, uint zero, uint opaque_zero) {
    const bool HALF = tile_bits(T(1.0f), T(0.0f)) == 0x3c00u;
    uint number = (HALF ? 0x64006400u : 0x43004300u) + opaque_zero;
    uint q = ((word >> (4 * p)) & 0x000f000fu) | number;
    q = fma_pair(T(), q, HALF ? 0x3c003c00u : 0x3f803f80u, HALF ? 0xe400e400u : 0xc300c300u);
    *(uint*)(&t.e[0]) = fma_pair(T(), q, scale, zero);
}

// The same of e2m1 (a sign, two bits of exponent, one of fraction): its bits are a bfloat16's, 2^126 times smaller.
template <typename T>
FN void set_e2m1(Tile<T>& t, uint word, int p, uint scale) {
    uint magnitude = p < 2 ? word << ((6 - 4 * p) & 31) : word >> ((4 * p - 6) & 31);
    uint bits = (magnitude & 0x01c001c0u) | ((word << (12 - 4 * p)) & 0x80008000u);
    bits = fma_pair(T(), bits, 0x7e807e80u, 0x80008000u);
    *(uint*)(&t.e[0]) = fma_pair(T(), bits, scale, 0x80008000u);
}
