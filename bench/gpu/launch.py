"""Launch overhead: chains of kernels that do next to nothing, by their number of inputs.

    python -m bench.gpu.launch [--length 140] [--inputs 2,4,8,12] [--spin 0,16000]

`host` is the time until `mx.async_eval` returns, `total` until the last kernel has run, `device` what the kernels take
when the host is far ahead of them (a long matmul runs first). Other values of MLX_MAX_OPS_PER_BUFFER and
MLX_MAX_MB_PER_BUFFER show what a graph costs. With --spin, kernels take that many device cycles: then `launched ahead`
should equal `device`, and is more where the host waits for it.
"""

import argparse
import os
import statistics
import time
from functools import partial
from itertools import count

import mlx.core as mx

LAYER = (2, 6, 3, 2, 3)  # inputs of the five kernels of a Qwen3 layer
SIZE = 128 * 128


def make_kernel(inputs, number, outputs=1, spin=0):
    names = ["a"] + [f"w{i}" for i in range(inputs - 1)]
    out = ["out", "more"][:outputs]
    read = " + ".join(f"{n}[i]" if n != "w1" else "w1[i % 64]" for n in names)
    text = f"unsigned i = blockIdx.x * blockDim.x + threadIdx.x; float v = {read};"
    text += " ".join(f"{name}[i] = v + {number};" for name in out)
    if spin:
        text = f"long long began = clock64(); while (clock64() - began < {spin}) {{}} " + text
    kernel = mx.fast.cuda_kernel(
        name=f"launch_{inputs}_{number}_{outputs}_{spin}", input_names=names, output_names=out, source=text
    )

    def call(*arrays):
        shapes, kinds = [(SIZE,)] * outputs, [mx.float32] * outputs
        return kernel(
            inputs=list(arrays), grid=(SIZE, 1, 1), threadgroup=(128, 1, 1), output_shapes=shapes, output_dtypes=kinds
        )

    return call


def device_seconds(make):
    """Seconds the device needs for what `make` builds, without the host's time."""
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


def time_steps(step, x, states):
    """Median seconds to build a step, to launch it, until it has run; of one launched ahead; of the device alone."""
    spent = []
    for _ in range(20):
        mx.synchronize()
        at = [time.perf_counter()]
        x, states = step(x, states)
        at.append(time.perf_counter())
        mx.async_eval(x, states)
        at.append(time.perf_counter())
        mx.synchronize()
        at.append(time.perf_counter())
        spent.append((at[1] - at[0], at[2] - at[1], at[3] - at[1]))
    # As decoding does it: the next step is built and launched while this one runs.
    mx.synchronize()
    began = time.perf_counter()
    for _ in range(20):
        x, states = step(x, states)
        mx.async_eval(x, states)
    mx.synchronize()
    return [
        *map(statistics.median, zip(*spent)),
        (time.perf_counter() - began) / 20,
        device_seconds(lambda: step(x, states)[0]),
    ]


def measure(length, inputs, *, distinct=False, stateful=False, big=SIZE, spin=0, variants=1, host=None, residual=False):
    """`inputs`: of each kernel of a layer. `distinct`: every kernel of a layer is another one. `stateful`: the second
    also takes and makes a state, as attention does. `big`: elements of an input, of which a kernel reads the first few.
    `variants`: so many steps that differ a little alternate, so that MLX does not relaunch a graph that still runs.
    `host`: every second kernel of a layer reads an array made from Python numbers in this step, as it is or copied.
    `residual`: the third and fifth also read what the kernel before last made, so that the graph is no chain."""
    layers = length // len(inputs)
    calls = [make_kernel(n, i if distinct else 0, 2 if stateful and i == 1 else 1, spin) for i, n in enumerate(inputs)]
    weights = [[[mx.zeros(big) for _ in range(n - 1)] for n in inputs] for _ in range(layers)]
    mx.eval(weights)

    def chain(more, x, states, given):
        new = []
        for layer, held in enumerate(weights):
            kept = x
            for i, (call, w) in enumerate(zip(calls, held)):
                if stateful and i == 1:
                    x, state = call(x, states[layer], *(w[1:] if given is None else [given, *w[2:]]))
                    new.append(state)
                    continue
                [x] = call(x, *([kept, *w[1:]] if residual and i in (2, 4) else w))
                kept = x if i in (2, 4) else kept
        for _ in range(more):
            [x] = calls[0](x, *weights[0][0])
        return x, new

    steps = [mx.compile(partial(chain, more)) for more in range(variants)]
    number = count()

    def step(x, states):
        given = None if host is None else mx.array([float(i) for i in range(64)])
        return steps[next(number) % variants](x, states, given + 0 if host == "copied" else given)

    x, states = mx.zeros(SIZE), [mx.zeros(SIZE) for _ in range(layers)]
    for _ in range(6):
        x, states = step(x, states if stateful else [])
        mx.eval(x, states)
    us = time_steps(step, x, states)
    what = f"{inputs} inputs of {big * 4 / 1e6:.2f} MB{', several kernels' * distinct}{', states' * stateful}"
    what += (
        ", residuals" * residual
        + f", host array {host}" * bool(host)
        + f", {spin} cycles, {variants} steps" * bool(spin)
    )
    times = "replay {:.2f}, host {:.2f}, total {:.2f}; launched ahead {:.2f}, device {:.2f}"
    print(f"{what}: us a launch: {times.format(*(1e6 * t / length for t in us))}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=140)
    parser.add_argument("--inputs", default="2,4,8,12")
    parser.add_argument("--spin", default="0,16000")
    args = parser.parse_args()
    print({k: v for k, v in os.environ.items() if k.startswith("MLX_")}, flush=True)
    for inputs in filter(None, args.inputs.split(",")):
        measure(args.length, (int(inputs),))
    for host in (None, "as they are", "copied"):
        measure(args.length, LAYER, distinct=True, stateful=True, host=host)
    for _ in range(2):  # twice: machines are noisy
        for residual in (False, True):
            measure(args.length, LAYER, distinct=True, stateful=True, residual=residual)
    for spin in map(int, filter(None, args.spin.split(","))):
        for variants in (1, 2):
            measure(args.length, LAYER, distinct=True, stateful=True, spin=spin, variants=variants)


if __name__ == "__main__":
    main()
