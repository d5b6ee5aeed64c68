"""What makes a process's CUDA graphs slower for good (docs/decisions/0033): a graph's time before and after each.

    python -m bench.gpu.slow_graphs [--shape qwen3-0.6b@4bit] [--layers 14] [--times 120] [--only NAME ...]

Each is done in a process of its own, `times` times, with the graph of a decode step launched after every one. A graph
that is slower afterwards, when it is launched alone again, stays so.
"""

import argparse
import ctypes
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import mlxrt  # noqa: F401  before MLX

import mlx.core as mx  # isort: skip
import numpy as np

from bench.gpu.clock import Clock
from bench.gpu.shapes import random_model
from bench.gpu.step import record_step
from mlxrt.kernels.cuda.graph import Driver, Graph, Result, pack_addresses
from mlxrt.kernels.cuda.nvrtc import Launch

ONE = np.ones(1, np.uint32)
TIME_LIMIT = 60  # seconds for each


def actions(driver: Driver, launch: Launch) -> dict[str, Callable[[], Any]]:
    """By name: some of ours, some of the driver's, some of MLX's."""
    small, large, other = mx.zeros((1,), mx.uint32), mx.zeros((1024,), mx.uint32), mx.zeros((1024,), mx.uint32)
    host = np.arange(96, dtype=np.int32)
    mx.eval(small, large, other)
    shared, at, to = driver.addresses([small, large, other])
    arguments = pack_addresses(driver.addresses([*launch.inputs, *launch.outputs]))
    pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
    function, sizes = driver.function(launch), (*launch.blocks, *launch.threads)
    sixteen = ctypes.c_size_t(16)
    return {
        "nothing": lambda: None,
        "kernel": lambda: driver("cuLaunchKernel", function, *sizes, 0, driver.stream, pointers, None),
        "memset": lambda: driver("cuMemsetD32Async", ctypes.c_uint64(to), 0, ctypes.c_size_t(4), driver.stream),
        "copy by the driver": lambda: driver(
            "cuMemcpyDtoDAsync_v2", ctypes.c_uint64(to), ctypes.c_uint64(at), sixteen, driver.stream
        ),
        "copy": lambda: driver.copy([(to, at, 16)]),
        "upload": lambda: driver.upload([(to, ONE)]),
        "upload to shared memory": lambda: driver.upload([(shared, ONE)]),
        "fetch": lambda: driver.fetch([Result(at, (1, 4), mx.uint32)]),
        "addresses": lambda: driver.addresses([large, other]),
        "mlx: add": lambda: mx.eval(large + other),
        "mlx: add a number": lambda: mx.eval(large + 1),
        "mlx: add an array of the host": lambda: mx.eval(mx.array(host) + 1),
        "mlx: take by an array of the host": lambda: mx.eval(mx.take(large, mx.array(host))),
        "mlx: add, read on the host": lambda: (large + other).tolist(),
        "mlx: one number, read on the host": lambda: mx.max(large).item(),
        "mlx: synchronize": mx.synchronize,
    }


def measure_graph(driver: Driver, graph: Graph, rounds: int = 60) -> float:
    """us of one launch, many one after another."""
    driver.wait()
    began = time.perf_counter()
    for _ in range(rounds):
        graph.launch()
    driver.wait()
    return 1e6 * (time.perf_counter() - began) / rounds


def measure(name: str, shape: str, layers: int, times: int) -> None:
    model = random_model(shape, layers=layers)
    launches = record_step(model, 1, 512, "full")
    clock = Clock(model.kernels.gpu.library)
    driver, graph = clock.driver, clock.make_graph(launches)
    act = actions(driver, launches[0])[name]
    before = [measure_graph(driver, graph) for _ in range(2)][-1]
    for _ in range(times):
        act()
        graph.launch()
    mx.synchronize()
    after = [measure_graph(driver, graph) for _ in range(2)][-1]
    print(f"{name:36} {len(launches)} kernels {before:7.1f} us, then {after:7.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-0.6b@4bit")
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--times", type=int, default=120)
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--here", metavar="NAME", help="this one, in this process")
    args = parser.parse_args()
    if args.here:
        return measure(args.here, args.shape, args.layers, args.times)
    model = random_model(args.shape, layers=2)
    clock = Clock(model.kernels.gpu.library)
    for name in args.only or actions(clock.driver, record_step(model, 1, 64, "full")[0]):
        own = ["--here", name, "--shape", args.shape, "--layers", str(args.layers), "--times", str(args.times)]
        try:
            subprocess.run([sys.executable, "-m", "bench.gpu.slow_graphs", *own], timeout=TIME_LIMIT)
        except subprocess.TimeoutExpired:
            print(f"{name:36} did not end in {TIME_LIMIT} s", flush=True)


if __name__ == "__main__":
    main()
