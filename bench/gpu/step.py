"""Device time of a decode step by kernel, without MLX's host side.

    python -m bench.gpu.step SHAPE ... [--prompt 512] [--batch 1] [--kv full,q8] [--layers N]

One step of the engine is recorded (code, grid, arrays) and replayed as one CUDA graph, as the engine does it. The
difference to what bench.gpu.decode measures is the host's time. Few layers make it a quick trial of a changed kernel.
"""

import argparse
import itertools
import time

import mlxrt  # noqa: F401  before MLX

import mlx.core as mx  # isort: skip

from bench.gpu.clock import Clock
from bench.gpu.shapes import make_prompts, make_request, random_model
from mlxrt import Engine, EngineConfig
from mlxrt.engine.engine import Source
from mlxrt.kernels.cuda.nvrtc import Launch


def copy_bandwidth() -> float:
    """Bytes read and written a second."""
    x = mx.random.normal((1 << 28,))
    mx.eval(x)
    best = 0.0
    for _ in range(5):
        began = time.perf_counter()
        mx.eval(x + 1)
        best = max(best, 2 * x.nbytes / (time.perf_counter() - began))
    return best


def record_step(model, batch: int, prompt: int, kv: str) -> list[Launch]:
    """The launches of one decode step, once every row has four tokens."""
    config = EngineConfig(kv=kv, max_context=prompt + 64, chunk=2048, compile=False, ahead=0, max_running=64)
    with Engine(model, config, source=Source("recorded")) as engine:
        prompts = make_prompts(model.config.vocab_size, batch, prompt)
        with engine.stream([make_request(p, 12) for p in prompts]) as stream, model.kernels.capturing(True):
            count = dict.fromkeys(stream.ids, 0)
            while min(count.values()) < 4:
                count[next(stream).id] += 1
            with model.kernels.gpu.library.recording() as launches:
                for _ in range(batch):
                    next(stream)
            mx.eval([one.outputs for one in launches])
    return launches


def print_table(clock: Clock, launches: list[Launch], bandwidth: float) -> None:
    """One line for each kernel and grid, and the sum."""
    groups: dict[tuple, list[Launch]] = {}
    for one in launches:
        groups.setdefault((one.name, one.blocks, one.threads), []).append(one)
    step, total = clock.device_seconds(launches), 0.0
    for (name, blocks, threads), same in groups.items():
        repeat = max(1, 24 // len(same))  # a graph's own start is not a kernel's
        seconds = clock.device_seconds(same * repeat) / repeat
        total += seconds
        read = sum(max(a.nbytes for a in one.inputs) for one in same)
        print(
            f"  {name[:-25]:44} {len(same):4} x {1e6 * seconds / len(same):7.2f} us = {1e6 * seconds:7.0f} us, "
            f"largest input {read / len(same) / 1e6:8.2f} MB ({read / seconds / bandwidth:4.0%} of copying), "
            f"{blocks[0]}x{blocks[1]}x{blocks[2]} of {threads[0]}"
        )
    print(f"  {len(launches)} launches in one graph: {1e6 * step:.0f} us; sum of the lines {1e6 * total:.0f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--kv", default="full", help="KV cache kinds, such as full,q8,q4")
    parser.add_argument("--layers", type=int)
    args = parser.parse_args()
    bandwidth = copy_bandwidth()
    for shape, kv in itertools.product(args.shapes, args.kv.split(",")):
        print(f"{shape}, {kv}, batch {args.batch}, prompt {args.prompt}, copy {bandwidth / 1e9:.0f} GB/s", flush=True)
        model = random_model(shape, layers=args.layers)
        launches = record_step(model, args.batch, args.prompt, kv)
        print_table(Clock(model.kernels.gpu.library), launches, bandwidth)


if __name__ == "__main__":
    main()
