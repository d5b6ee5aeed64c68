"""What the device itself takes for a decode step: every kernel, timed without MLX's host side.

    python -m bench.gpu.device SHAPE ... [--prompt 512] [--batch 1] [--kv full,q8]

One step that is not compiled is recorded (code, grid, arrays); the same code is then launched by CUDA's driver in a
graph of its own. The table says where a step's device time goes; the difference to what bench.gpu.decode measures is
the host's. Needs kernels from mlxrt/kernels/cuda_compiler.py.
"""

import argparse
import ctypes
import itertools
import statistics
from dataclasses import dataclass

import mlxrt  # noqa: F401  before MLX

import mlx.core as mx  # isort: skip
import numpy as np

from bench.gpu.decode import ask, build, prompts_of
from bench.gpu.ops import copy_bandwidth
from mlxrt import EngineConfig
from mlxrt.engine import Engine, Source
from mlxrt.kernels.kernels import Gpu

CUDA_STREAM_CAPTURE_MODE_RELAXED = 2


@dataclass
class Launch:
    name: str
    code: bytes
    inputs: list[mx.array]
    outputs: list[mx.array]
    blocks: tuple[int, int, int]
    threads: tuple[int, int, int]


class Record:
    """Stands between a Gpu and its library: what is launched is kept."""

    def __init__(self, gpu: Gpu):
        self.launches: list[Launch] = []
        self.on = False
        run = gpu._make.run

        def recorded(*, name, compiled_source, inputs, grid, threadgroup, **rest):
            made = run(
                name=name, compiled_source=compiled_source, inputs=inputs, grid=grid, threadgroup=threadgroup, **rest
            )
            if self.on:
                blocks = tuple(-(-g // t) for g, t in zip(grid, threadgroup))
                self.launches.append(Launch(name, compiled_source, list(inputs), made, blocks, tuple(threadgroup)))
            return made

        gpu._make.run = recorded


class Driver:
    """As much of CUDA's driver as a timing needs, in the context MLX works in."""

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self("cuDeviceGet", ctypes.byref(device), 0)
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self("cuCtxSetCurrent", context)
        self.stream = ctypes.c_void_p()
        self("cuStreamCreate", ctypes.byref(self.stream), 1)
        self.functions: dict[str, ctypes.c_void_p] = {}
        self.buffers: dict[int, tuple[ctypes.c_uint64, mx.array]] = {}

    def __call__(self, name: str, *arguments) -> None:
        if code := getattr(self.cuda, name)(*arguments):
            raise RuntimeError(f"{name}: CUDA error {code}")

    def function(self, launch: Launch) -> ctypes.c_void_p:
        if launch.name not in self.functions:
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            self("cuModuleLoadData", ctypes.byref(module), launch.code)
            self("cuModuleGetFunction", ctypes.byref(function), module, launch.name.encode())
            self.functions[launch.name] = function
        return self.functions[launch.name]

    def buffer(self, a: mx.array) -> ctypes.c_uint64:
        if id(a) not in self.buffers:
            held = np.ascontiguousarray(np.array(a.reshape(-1).view(mx.uint8)))
            pointer = ctypes.c_uint64()
            self("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(held.nbytes))
            self("cuMemcpyHtoD_v2", pointer, held.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(held.nbytes))
            self.buffers[id(a)] = pointer, a
        return self.buffers[id(a)][0]

    def launch(self, one: Launch) -> None:
        pointers = [self.buffer(a) for a in [*one.inputs, *one.outputs]]
        places = (ctypes.c_void_p * len(pointers))(*(ctypes.addressof(p) for p in pointers))
        self("cuLaunchKernel", self.function(one), *one.blocks, *one.threads, 0, self.stream, places, None)

    def seconds(self, launches: list[Launch], rounds: int = 15) -> float:
        """Of all of them, one after another in one graph."""
        for one in launches:
            self.function(one)
            for a in [*one.inputs, *one.outputs]:
                self.buffer(a)
        graph, ready = ctypes.c_void_p(), ctypes.c_void_p()
        self("cuStreamBeginCapture_v2", self.stream, CUDA_STREAM_CAPTURE_MODE_RELAXED)
        for one in launches:
            self.launch(one)
        self("cuStreamEndCapture", self.stream, ctypes.byref(graph))
        self("cuGraphInstantiateWithFlags", ctypes.byref(ready), graph, ctypes.c_uint64(0))
        events = [ctypes.c_void_p() for _ in range(2)]
        for event in events:
            self("cuEventCreate", ctypes.byref(event), 0)
        spent = []
        for _ in range(rounds):
            self("cuEventRecord", events[0], self.stream)
            self("cuGraphLaunch", ready, self.stream)
            self("cuEventRecord", events[1], self.stream)
            self("cuStreamSynchronize", self.stream)
            took = ctypes.c_float()
            self("cuEventElapsedTime", ctypes.byref(took), *events)
            spent.append(took.value / 1e3)
        self("cuGraphExecDestroy", ready)
        self("cuGraphDestroy", graph)
        return statistics.median(spent[3:])


def table(driver: Driver, launches: list[Launch], copy: float) -> None:
    """One line for each kernel and grid, and the whole."""
    groups: dict[tuple, list[Launch]] = {}
    for one in launches:
        groups.setdefault((one.name, one.blocks, one.threads), []).append(one)
    whole, total = driver.seconds(launches), 0.0
    for (name, blocks, threads), held in groups.items():
        took = driver.seconds(held * max(1, 24 // len(held))) / max(1, 24 // len(held))
        total += took
        read = sum(max(a.nbytes for a in one.inputs) for one in held)
        print(
            f"  {name[:-25]:44} {len(held):4} x {1e6 * took / len(held):7.2f} us = {1e6 * took:7.0f} us, "
            f"largest input {read / len(held) / 1e6:8.2f} MB ({read / took / copy:4.0%} of copying), "
            f"{blocks[0]}x{blocks[1]}x{blocks[2]} of {threads[0]}"
        )
    print(f"  {len(launches)} launches one after another in a graph: {1e6 * whole:.0f} us; lines {1e6 * total:.0f} us")


def recorded(shape: str, batch: int, prompt: int, kv: str) -> list[Launch]:
    """The launches of one decode step in the engine, once every row has four tokens."""
    model = build(shape, "auto", prompt + 64, peer=False)[0].model
    record = Record(model.kernels.gpu)
    config = EngineConfig(kv=kv, max_context=prompt + 64, chunk=2048, compile=False, ahead=0, max_running=64)
    with Engine(model, config, source=Source(shape), say=lambda line: None) as engine:
        prompts, done = prompts_of(model.config.vocab_size, batch, prompt), False
        with engine.stream([ask(p, 12) for p in prompts]) as stream:
            count = dict.fromkeys(stream.ids, 0)
            for event in stream:
                count[event.id] += 1
                done |= bool(record.launches)
                record.on = not done and min(count.values()) >= 4
    return record.launches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--kv", default="full", help="kinds of keys and values, full,q8,q4")
    args = parser.parse_args()
    copy = copy_bandwidth()
    for shape, kv in itertools.product(args.shapes, args.kv.split(",")):
        print(f"{shape}, {kv}, batch {args.batch}, prompt {args.prompt}, copy {copy / 1e9:.0f} GB/s", flush=True)
        table(Driver(), recorded(shape, args.batch, args.prompt, kv), copy)


if __name__ == "__main__":
    main()
