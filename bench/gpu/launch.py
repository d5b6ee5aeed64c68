"""What a launch costs: chains of kernels that do next to nothing, by how many inputs each has.

    python -m bench.gpu.launch [--length 140]

`host` is the time until `mx.async_eval` returns, `whole` until the last kernel has run, `device` what the kernels take
when the host is far ahead of them (a long product runs first). Run it under other values of MLX_MAX_OPS_PER_BUFFER and
MLX_MAX_MB_PER_BUFFER to see what a graph costs.
"""

import argparse
import os
import statistics
import time

import mlx.core as mx

SMALL = "unsigned i = blockIdx.x * blockDim.x + threadIdx.x; out[i] = a[i] + {sum};"


def kernel(inputs):
    names = ["a"] + [f"w{i}" for i in range(inputs - 1)]
    text = SMALL.format(sum=" + ".join(f"{n}[i]" for n in names[1:]) or "1")
    made = mx.fast.cuda_kernel(name=f"launch_{inputs}", input_names=names, output_names=["out"], source=text)

    def call(*arrays, blocks):
        size = arrays[0].size
        return made(
            inputs=list(arrays), grid=(size, 1, 1), threadgroup=(size // blocks, 1, 1), output_shapes=[(size,)],
            output_dtypes=[mx.float32],
        )[0]  # fmt: skip

    return call


def device(make):
    """Seconds the device needs for what `make` builds, the host's time left out."""
    big = mx.random.normal((8192, 8192)).astype(mx.bfloat16)
    spent = []
    for _ in range(6):
        for more in (False, True):
            y = big
            for _ in range(16):
                y = y @ big
            after = make() if more else None
            mx.synchronize()
            began = time.perf_counter()
            mx.async_eval(y)
            if more:
                mx.async_eval(after)
            mx.synchronize()
            spent.append(time.perf_counter() - began)
    return statistics.median(spent[1::2]) - statistics.median(spent[::2])


def measure(length, inputs, blocks, big):
    call = kernel(inputs)
    # Big inputs count against the megabytes a graph may name, although the kernel reads only their first bytes.
    weights = [[mx.zeros(big or blocks * 128) for _ in range(inputs - 1)] for _ in range(length)]
    mx.eval(weights)

    def chain(x):
        for w in weights:
            x = call(x, *w, blocks=blocks)
        return x

    step = mx.compile(chain)
    x = mx.zeros(blocks * 128)
    for _ in range(5):
        x = step(x)
        mx.eval(x)
    host, whole, build = [], [], []
    for _ in range(20):
        mx.synchronize()
        t0 = time.perf_counter()
        x = step(x)
        t1 = time.perf_counter()
        mx.async_eval(x)
        t2 = time.perf_counter()
        mx.synchronize()
        t3 = time.perf_counter()
        build.append(t1 - t0), host.append(t2 - t1), whole.append(t3 - t1)
    # As decoding does it: the next step is built and launched while this one runs.
    mx.synchronize()
    t0 = time.perf_counter()
    for _ in range(20):
        x = step(x)
        mx.async_eval(x)
    mx.synchronize()
    ahead = (time.perf_counter() - t0) / 20
    us = [statistics.median(v) * 1e6 / length for v in (build, host, whole)] + [ahead * 1e6 / length]
    us.append(device(lambda: step(x)) * 1e6 / length)
    print(
        f"{length} kernels of {blocks} groups, {inputs} inputs, {big * 4 / 1e6:.0f} MB each: "
        "us a launch: replay {:.2f}, host {:.2f}, whole {:.2f}; launched ahead {:.2f}, device {:.2f}".format(*us),
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=140)
    args = parser.parse_args()
    print({k: v for k, v in os.environ.items() if k.startswith("MLX_")}, flush=True)
    for inputs in (2, 4, 8, 12):
        measure(args.length, inputs, 128, 0)
    measure(args.length, 4, 128, 2_500_000)
    measure(args.length, 4, 2048, 0)


if __name__ == "__main__":
    main()
