"""What the device itself takes for a decode step: every kernel, timed without MLX's host side.

    python -m bench.gpu.device SHAPE ... [--prompt 512] [--batch 1] [--kv full,q8]

One step is recorded (code, grid, arrays) and launched again as the engine does it (mlxrt/engine/cuda_graph.py). The
table says where a step's device time goes; the difference to what bench.gpu.decode measures is the host's. Needs
kernels from mlxrt/kernels/cuda/nvrtc.py.
"""

import argparse
import itertools

import mlxrt  # noqa: F401  before MLX

import mlx.core as mx  # isort: skip

from bench.gpu.clock import Clock
from bench.gpu.decode import ask, build, prompts_of
from bench.gpu.ops import copy_bandwidth
from mlxrt import EngineConfig
from mlxrt.engine.engine import Engine, Source
from mlxrt.kernels.cuda.nvrtc import Launch


def table(clock: Clock, launches: list[Launch], copy: float) -> None:
    """One line for each kernel and grid, and the whole."""
    groups: dict[tuple, list[Launch]] = {}
    for one in launches:
        groups.setdefault((one.name, one.blocks, one.threads), []).append(one)
    whole, total = clock.seconds(launches), 0.0
    for (name, blocks, threads), held in groups.items():
        took = clock.seconds(held * max(1, 24 // len(held))) / max(1, 24 // len(held))
        total += took
        read = sum(max(a.nbytes for a in one.inputs) for one in held)
        print(
            f"  {name[:-25]:44} {len(held):4} x {1e6 * took / len(held):7.2f} us = {1e6 * took:7.0f} us, "
            f"largest input {read / len(held) / 1e6:8.2f} MB ({read / took / copy:4.0%} of copying), "
            f"{blocks[0]}x{blocks[1]}x{blocks[2]} of {threads[0]}"
        )
    print(f"  {len(launches)} launches one after another in a graph: {1e6 * whole:.0f} us; lines {1e6 * total:.0f} us")


def recorded(model, shape: str, batch: int, prompt: int, kv: str) -> list[Launch]:
    """The launches of one decode step in the engine, once every row has four tokens."""
    config = EngineConfig(kv=kv, max_context=prompt + 64, chunk=2048, compile=False, ahead=0, max_running=64)
    with Engine(model, config, source=Source(shape)) as engine:
        prompts = prompts_of(model.config.vocab_size, batch, prompt)
        with engine.stream([ask(p, 12) for p in prompts]) as stream, model.kernels.capturing(True):
            count = dict.fromkeys(stream.ids, 0)
            while min(count.values()) < 4:
                count[next(stream).id] += 1
            with model.kernels.gpu.library.recording() as launches:
                for _ in range(batch):
                    next(stream)
            mx.eval([one.outputs for one in launches])
    return launches


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
        model = build(shape, "auto", args.prompt + 64, peer=False)[0].model
        launches = recorded(model, shape, args.batch, args.prompt, kv)
        table(Clock(model.kernels.gpu.library), launches, copy)


if __name__ == "__main__":
    main()
