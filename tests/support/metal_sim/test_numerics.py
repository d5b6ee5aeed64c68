"""What kernels compute in the simulator, against MLX and numpy."""

import mlx.core as mx
import numpy as np
import pytest

from . import ASCENDING, DESCENDING, SHUFFLED, MetalCompileError, Simulator, example

FLOATS = {mx.float32: 1e-5, mx.float16: 4e-3, mx.bfloat16: 3e-2}
BY_NAME = pytest.mark.parametrize("dtype", FLOATS, ids=["f32", "f16", "bf16"])
NUMBER = "uint i = thread_position_in_grid.x; uint lane = thread_index_in_simdgroup;"


def run(source, inputs, shape, dtype=mx.float32, threads=32, group=32, header="", sim=None, **more):
    names = [f"x{n}" for n in range(len(inputs))]
    options = {k: more.pop(k) for k in ("atomic_outputs", "ensure_row_contiguous") if k in more}
    kernel = (sim or Simulator()).metal_kernel("k", names, ["out"], NUMBER + source, header, **options)
    grid, size = (threads, 1, 1), (group, 1, 1)
    return kernel(inputs=inputs, output_shapes=[shape], output_dtypes=[dtype], grid=grid, threadgroup=size, **more)[0]


@BY_NAME
@pytest.mark.parametrize("order", [ASCENDING, DESCENDING, SHUFFLED])
def test_matvec(dtype, order):
    inputs, expected = example.operands(131, 768, 2, dtype)
    sim = Simulator(order, seed=5)
    y = example.matvec(sim.metal_kernel, inputs)
    assert y.dtype == dtype
    assert mx.abs(y.astype(mx.float32) - expected).max() < FLOATS[dtype]
    assert not sim.errors()


def test_f16_and_bf16_round_as_mlx_does():
    """Every float16 and bfloat16 through float and back, and awkward floats into both."""
    bits = mx.arange(1 << 16).astype(mx.uint16)
    awkward = mx.array(
        [65504.0, 65519.9, 65520.0, 1e-7, 2.9e-8, 3.1e-8, 6e-8, -0.0, 1.00048828125, 3.4e38, 1e-40, 257.0]
    )
    for dtype in (mx.float16, mx.bfloat16):
        exact = bits.view(dtype)
        back = run("out[i] = static_cast<float>(x0[i]);", [exact], (1 << 16,), threads=1 << 16, group=256)
        assert mx.array_equal(back, exact.astype(mx.float32), equal_nan=True)
        cut = run(f"out[i] = static_cast<{'half' if dtype == mx.float16 else 'bfloat'}>(x0[i]);",
                  [awkward], (12,), dtype, threads=12, group=12)  # fmt: skip
        assert mx.array_equal(cut.view(mx.uint16), awkward.astype(dtype).view(mx.uint16))


def test_bfloat_takes_no_float_without_a_cast():
    with pytest.raises(MetalCompileError, match="bfloat"):
        run("out[i] = metal::exp(float(x0[i]));", [mx.zeros((32,), mx.bfloat16)], (32,), mx.bfloat16)


SIMD = {
    "simd_sum(v)": lambda v: np.full(32, v.sum()),
    "simd_max(v)": lambda v: np.full(32, v.max()),
    "simd_min(v)": lambda v: np.full(32, v.min()),
    "simd_product(v)": lambda v: np.full(32, v.prod()),
    "simd_shuffle(v, (lane * 7) % 32)": lambda v: v[np.arange(32) * 7 % 32],
    "simd_shuffle_xor(v, 5)": lambda v: v[np.arange(32) ^ 5],
    "simd_shuffle_down(v, 3)": lambda v: v[np.where(np.arange(32) + 3 < 32, np.arange(32) + 3, np.arange(32))],
    "simd_shuffle_up(v, 3)": lambda v: v[np.where(np.arange(32) >= 3, np.arange(32) - 3, np.arange(32))],
    "simd_shuffle_rotate_down(v, 3)": lambda v: np.roll(v, -3),
    "simd_shuffle_and_fill_up(v, 9.0f, 2)": lambda v: np.concatenate([[9, 9], v[:-2]]),
    "simd_broadcast(v, 11)": lambda v: np.full(32, v[11]),
    "simd_broadcast_first(v)": lambda v: np.full(32, v[0]),
    "simd_prefix_inclusive_sum(v)": np.cumsum,
    "simd_prefix_exclusive_sum(v)": lambda v: np.cumsum(v) - v,
    "quad_sum(v)": lambda v: np.repeat(v.reshape(8, 4).sum(1), 4),
    "quad_shuffle_xor(v, 1)": lambda v: v[np.arange(32) ^ 1],
    "float(simd_any(v > 1.0f))": lambda v: np.full(32, float((v > 1).any())),
    "float(simd_all(v > 0.0f))": lambda v: np.full(32, float((v > 0).all())),
    "float(ulong(simd_ballot(v > 1.0f)) >> lane & 1)": lambda v: (v > 1).astype(float),
}


@pytest.mark.parametrize("call", SIMD)
def test_simd_ops(call):
    v = np.random.default_rng(0).uniform(0.5, 1.5, 64).astype(np.float32)
    out = run(f"float v = x0[i]; out[i] = {call};", [mx.array(v)], (64,), threads=64, group=64)
    expected = np.concatenate([SIMD[call](half.astype(np.float64)) for half in (v[:32], v[32:])])
    np.testing.assert_allclose(np.array(out), expected, rtol=2e-6)


MATRIX = """
    simdgroup_matrix<T, 8, 8> a; simdgroup_matrix<T, 8, 8> b; simdgroup_matrix<float, 8, 8> c(0.0f);
    for (int k = 0; k < 24; k += 8) {
        simdgroup_load(a, x0 + (TA ? k * 8 : k), TA ? 8 : 24, ulong2(0, 0), TA);
        simdgroup_load(b, x1 + (TB ? k : k * 8), TB ? 24 : 8, ulong2(0, 0), TB);
        simdgroup_multiply_accumulate(c, a, b, c);
    }
    simdgroup_store(c, out, 8, ulong2(0, 0), TC);
"""


@BY_NAME
@pytest.mark.parametrize("flips", [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1)])
def test_simdgroup_matrices(dtype, flips):
    mx.random.seed(1)
    a, b = mx.random.normal((8, 24)).astype(dtype), mx.random.normal((24, 8)).astype(dtype)
    given = [a.T if flips[0] else a, b.T if flips[1] else b]
    template = [("T", dtype), *zip(("TA", "TB", "TC"), map(bool, flips))]
    c = run(MATRIX, given, (8, 8), template=template)
    expected = a.astype(mx.float32) @ b.astype(mx.float32)
    assert mx.abs((c.T if flips[2] else c) - expected).max() < 1e-4


def test_matrix_elements_lie_where_mlx_s_kernels_expect_them():
    """MLX's steel kernels write fragments by lane: row and column of a lane's first element, as in its mma.h."""
    source = """
        uint quad = lane / 4; uint row = (quad & 4) + (lane / 2) % 4; uint col = (quad & 2) * 2 + (lane % 2) * 2;
        simdgroup_matrix<float, 8, 8> m;
        m.thread_elements()[0] = x0[row * 8 + col]; m.thread_elements()[1] = x0[row * 8 + col + 1];
        simdgroup_store(m, out, 8);
    """
    x = mx.arange(64).astype(mx.float32)
    assert mx.array_equal(run(source, [x], (64,)), x)


def test_atomics_add_up():
    source = "atomic_fetch_add_explicit(&out[i % 5], x0[i], memory_order_relaxed);"
    x = mx.arange(256).astype(mx.float32)
    out = run(source, [x], (5,), threads=256, group=64, atomic_outputs=True, init_value=0)
    assert mx.array_equal(out, mx.array([sum(range(r, 256, 5)) for r in range(5)], mx.float32))


def test_strided_inputs_come_with_their_strides():
    x = mx.random.normal((12, 10)).T[1:9:2]
    source = "out[i] = x0[elem_to_loc(i, x0_shape, x0_strides, x0_ndim)];"
    out = run(source, [x], (48,), threads=48, group=16, ensure_row_contiguous=False)
    assert mx.array_equal(out, x.flatten())
    assert mx.array_equal(run("out[i] = x0[i];", [x], (48,), threads=48, group=16), x.flatten())


def test_few_elements_and_scalars():
    source = "out[i] = x0[i % 3] + float(x1) + static_cast<float>(x2);"
    out = run(source, [mx.array([1.0, 2.0, 3.0]), 10, mx.array(0.5, mx.bfloat16)], (6,), threads=6, group=6)
    assert out.tolist() == [11.5, 12.5, 13.5, 11.5, 12.5, 13.5]


def test_edge_threadgroups_are_smaller():
    out = run("out[i] = threads_per_threadgroup.x;", [mx.zeros(8)], (70,), mx.uint32, threads=70, group=32)
    assert out.tolist() == [32] * 64 + [6] * 6


def test_vectors_and_bits():
    source = """
        float4 v = float4(x0[0], x0[1], x0[2], x0[3]); v.xy += v.zw; v = v.wzyx * 2.0f;
        uint2 u = as_type<uint2>(float2(v.x, v.y)); uchar4 c = as_type<uchar4>(0x04030201u);
        out[i] = dot(v, float4(1.0f)) + as_type<float>(u.x) + float(c[3]) + float(extract_bits(0xABCDu, 4u, 8u))
            + float(popcount(0xFu)) + float(clz(1u));
    """
    x = mx.array([1.0, 2.0, 3.0, 4.0])
    assert run(source, [x], (1,), threads=1, group=1).item() == 2 * (4 + 3 + 6 + 4) + 8 + 4 + 0xBC + 4 + 31


def test_a_text_may_include_mlx_s_own_headers():
    header = '#include "mlx/backend/metal/kernels/steel/gemm/gemm.h"\n'
    source = """threadgroup float t[32]; t[lane] = x0[i]; simdgroup_barrier(mem_flags::mem_threadgroup);
        out[i] = t[31 - lane];"""
    x = mx.arange(32).astype(mx.float32)
    assert mx.array_equal(run(source, [x], (32,), header=header), x[::-1])


BARRIER = "simdgroup_barrier(mem_flags::mem_threadgroup);"
SHARED = {
    "sizes are expressions": "threadgroup float t[N * 2][(N + 1) / 2 * 16];",
    "several at once": "threadgroup float other[N], t[2 * N][16 * N];",
    "a struct template": "threadgroup metal::vec<float, 2> pairs[N]; threadgroup float t[2][16];",
}


@pytest.mark.parametrize("declaration", SHARED.values(), ids=SHARED)
def test_threadgroup_memory_is_shared_however_it_is_declared(declaration):
    body = "t[lane / 16][lane % 16] = x0[i]; threadgroup float* p = &t[0][0]; " + BARRIER
    x = mx.arange(32).astype(mx.float32)
    out = run(f"{declaration} {body} out[i] = p[31 - lane];", [x], (32,), template=[("N", 1)])
    assert mx.array_equal(out, x[::-1])


def test_an_unknown_use_of_threadgroup_memory_is_refused():
    with pytest.raises(ValueError, match="threadgroup"):
        run("threadgroup float t = 0.0f; out[i] = t;", [mx.zeros(32)], (32,))


def test_unchecked_runs_compute_the_same():
    inputs, _ = example.operands(37, 128, 1, mx.float16)
    plain, checked = (example.matvec(Simulator(checked=c).metal_kernel, inputs) for c in (False, True))
    assert mx.array_equal(plain, checked)


def test_calls_are_refused_as_mlx_refuses_them():
    kernel = Simulator().metal_kernel("k", ["a"], ["o"], "o[0] = a[0]; thread_position_in_grid;")
    arrays = dict(inputs=[mx.zeros(8)], output_shapes=[(1,)], output_dtypes=[mx.float32])
    good = arrays | dict(grid=(1, 1, 1), threadgroup=(1, 1, 1))
    for wrong in ({"inputs": []}, {"output_shapes": []}, {"grid": (0, 1, 1)}, {"threadgroup": (2048, 1, 1)}):
        with pytest.raises(ValueError, match="k: "):
            kernel(**good | wrong)
