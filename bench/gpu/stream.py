"""Read bandwidth of threadgroups, each over its own range of memory, cached or not.

    python -m bench.gpu.stream [--groups 16,32,132,264] [--bytes 400000]

The upper bound of a kernel with one threadgroup a head. Timed by CUDA's driver (bench/gpu/clock.py).
"""

import argparse
import itertools

import mlxrt  # noqa: F401  before MLX

import mlx.core as mx  # isort: skip

from bench.gpu.clock import Clock
from mlxrt.kernels.cuda.nvrtc import Launch, Library, compile_cubin
from mlxrt.weights.source.cache_dir import cache_root

LOADS = {
    "plain": "v[u] = q[i + u * T];",
    "read only, past the first cache": (
        'asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"'
        ' : "=r"(v[u].x), "=r"(v[u].y), "=r"(v[u].z), "=r"(v[u].w) : "l"(q + i + u * T));'
    ),
}
SOURCE = """
extern "C" __global__ __launch_bounds__(T) void NAME(const uint4* p, float* out) {
    const uint4* q = p + blockIdx.x * N; uint4 sum = make_uint4(0, 0, 0, 0);
    for (unsigned i = threadIdx.x; i + (U - 1) * T < N; i += T * U) {
        uint4 v[U];
        #pragma unroll
        for (int u = 0; u < U; u++) { LOAD }
        #pragma unroll
        for (int u = 0; u < U; u++) { sum.x ^= v[u].x; sum.y ^= v[u].y; sum.z ^= v[u].z; sum.w ^= v[u].w; }
    }
    if ((sum.x ^ sum.y ^ sum.z ^ sum.w) == 0x12345678u) out[threadIdx.x] = 1.0f;
}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", default="16,32,132,264")
    parser.add_argument("--bytes", type=int, default=400_000, help="read by a threadgroup")
    args = parser.parse_args()
    architecture, out = str(mx.device_info()["architecture"]), mx.zeros(1024)
    clock = Clock(Library(cache_root() / "kernels", architecture))
    for groups in map(int, args.groups.split(",")):
        size = groups * args.bytes
        buffers = [mx.random.randint(0, 1 << 31, (size // 4,)) for _ in range(max(2, int(4e8 / size)))]
        for (name, load), threads, loads in itertools.product(LOADS.items(), (256, 512, 1024), (4, 8)):
            kernel = f"stream_{threads}_{loads}_{len(name)}"
            source = SOURCE.replace("NAME", kernel).replace("LOAD", load)
            source = f"#define T {threads}u\n#define U {loads}\n#define N {args.bytes // 16}u\n" + source
            code = compile_cubin(source, architecture)
            launches = [Launch(kernel, code, [b], [out], (groups, 1, 1), (threads, 1, 1)) for b in buffers]
            spent = [
                clock.device_seconds(l) / len(l) for l in (launches[:30] * (1 + 20 // len(launches)), launches[:1] * 30)
            ]
            rates = [args.bytes / s / 1e9 for s in spent]
            print(
                f"{groups} groups of {threads}, {loads} loads in flight, {name}: {1e6 * spent[0]:.1f} us, "
                f"{rates[0]:.1f} KB/us each; cached: {1e6 * spent[1]:.1f} us, {rates[1]:.1f} KB/us",
                flush=True,
            )


if __name__ == "__main__":
    main()
