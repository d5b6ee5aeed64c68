"""How fast threadgroups read: so many, each its own run of memory, that was read before or was not.

    python -m bench.gpu.stream [--groups 16,32,132,264] [--bytes 400000]

What a kernel of one threadgroup to a head can hope for. By CUDA's driver, as bench/gpu/device.py does it.
"""

import argparse
import itertools

import mlxrt  # noqa: F401  before MLX

import mlx.core as mx  # isort: skip

from bench.gpu.clock import Clock
from mlxrt.kernels.cuda.nvrtc import Launch, Library, compiled
from mlxrt.weights.source.cache_dir import cache_root

LOADS = {
    "plain": "v[u] = q[i + u * T];",
    "read only, past the first cache": (
        'asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"'
        ' : "=r"(v[u].x), "=r"(v[u].y), "=r"(v[u].z), "=r"(v[u].w) : "l"(q + i + u * T));'
    ),
}
TEXT = """
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
    parser.add_argument("--bytes", type=int, default=400_000, help="a threadgroup reads")
    args = parser.parse_args()
    architecture, out = str(mx.device_info()["architecture"]), mx.zeros(1024)
    clock = Clock(Library(cache_root() / "kernels", architecture, print))
    for groups in map(int, args.groups.split(",")):
        size = groups * args.bytes
        buffers = [mx.random.randint(0, 1 << 31, (size // 4,)) for _ in range(max(2, int(4e8 / size)))]
        for (name, load), threads, at_once in itertools.product(LOADS.items(), (256, 512, 1024), (4, 8)):
            kernel = f"stream_{threads}_{at_once}_{len(name)}"
            text = TEXT.replace("NAME", kernel).replace("LOAD", load)
            text = f"#define T {threads}u\n#define U {at_once}\n#define N {args.bytes // 16}u\n" + text
            code = compiled(text, architecture)
            launches = [Launch(kernel, code, [b], [out], (groups, 1, 1), (threads, 1, 1)) for b in buffers]
            spent = [clock.seconds(l) / len(l) for l in (launches[:30] * (1 + 20 // len(launches)), launches[:1] * 30)]
            rates = [args.bytes / s / 1e9 for s in spent]
            print(
                f"{groups} groups of {threads}, {at_once} at once, {name}: {1e6 * spent[0]:.1f} us, "
                f"{rates[0]:.1f} KB/us each; read before: {1e6 * spent[1]:.1f} us, {rates[1]:.1f} KB/us",
                flush=True,
            )


if __name__ == "__main__":
    main()
