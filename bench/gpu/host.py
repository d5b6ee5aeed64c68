"""Where the host's time of a decoded token goes, with CUDA graphs and without: what Macs get is the second.

    python -m bench.gpu.host SHAPE ... [--prompt 128] [--tokens 256] [--batch 1] [--layers N] [--params '{"top_k": 20}']

Launches a token, tokens a second, and microseconds of a step by part: `plan` (scheduler), `build` (the step's graph or
its CUDA graph), `encode` (mx.async_eval: MLX's launches), `read` (waiting for tokens, and making events of them), and
the rest of the engine's Python. Runs on any device; a CPU computes in `encode`'s background.
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import mlxrt  # noqa: F401  before MLX

import mlx.core as mx  # isort: skip

from bench.gpu.shapes import make_prompts, random_model
from mlxrt import Engine, EngineConfig, Request, SamplingParams
from mlxrt.engine.engine import Source
from mlxrt.kernels import backend


class PartTimes:
    """Wall seconds by part; a part's own time is without the parts inside it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.calls: Counter[str] = Counter()
        self._inside = [0.0]

    def measure(self, owner: Any, name: str, part: str) -> None:
        """Measure a method of this object from now on."""
        setattr(owner, name, self.wrap(getattr(owner, name), part))

    def wrap(self, call: Callable[..., Any], part: str) -> Callable[..., Any]:
        def timed(*args: Any, **named: Any) -> Any:
            self._inside.append(0.0)
            began = time.perf_counter()
            try:
                return call(*args, **named)
            finally:
                spent = time.perf_counter() - began
                own = spent - self._inside.pop()
                self._inside[-1] += spent
                self.seconds[part] = self.seconds.get(part, 0.0) + own
                self.calls[part] += 1

        return timed


def count_launches(model, config: dict[str, Any], prompts: list[list[int]], params: dict[str, Any]) -> float:
    """Kernels of ours a step; each would be launched by MLX, or be a node of the graph."""
    if (gpu := model.kernels.gpu) is None:
        return 0.0
    graphs = config["cuda_graphs"] is not False and gpu.library is not None
    uncompiled = config | {"compile": False, "cuda_graphs": False, "ahead": 0}
    counts = []
    with Engine(model, EngineConfig(**uncompiled), source=Source("counted")) as engine:
        for n in (2, 10):
            before = gpu.launches
            with model.kernels.capturing(graphs):
                engine.generate(make_requests(prompts, n, params))
            counts.append(gpu.launches - before)
    return (counts[1] - counts[0]) / 8


def make_requests(prompts: list[list[int]], n: int, params: dict[str, Any]) -> list[Request]:
    asked = SamplingParams(max_tokens=n, ignore_eos=True, **params)
    return [Request(tokens=tuple(p), params=asked) for p in prompts]


def measure(model, config: dict[str, Any], prompts: list[list[int]], tokens: int, params: dict[str, Any]) -> None:
    launches = count_launches(model, config, prompts, params)
    with Engine(model, EngineConfig(**config), source=Source("measured")) as engine:
        requests, core, runner = make_requests(prompts, tokens, params), engine.core, engine.core.runner
        engine.generate(requests)  # compiles and captures
        times = PartTimes()
        times.measure(core.scheduler, "plan", "plan")
        times.measure(runner, "run", "build")
        times.measure(runner, "_submit", "encode")
        times.measure(core, "_retire", "read")
        times.measure(core, "_step", "rest")
        with engine.stream(requests) as stream:
            for _ in range(2 * len(prompts)):
                next(stream)
            times.seconds.clear()
            times.calls.clear()
            began = time.perf_counter()
            count = sum(1 for _ in stream)
            wall, steps = time.perf_counter() - began, times.calls["rest"]
        graphs = runner.graphs.steps if runner.graphs is not None else 0
    parts = ", ".join(f"{part} {1e6 * spent / steps:.0f}" for part, spent in sorted(times.seconds.items()))
    way = "CUDA graphs" if graphs else "launched one by one"
    rate = f"{count / wall:.1f} tok/s, {launches:.0f} launches a step, {1e6 * wall / steps:.0f} us"
    print(f"  {way}: {rate}: {parts}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+", metavar="SHAPE", help="such as qwen3-8b@4bit")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--params", type=json.loads, default={}, help="sampling parameters as JSON")
    args = parser.parse_args()
    for shape in args.shapes:
        print(f"{shape}, batch {args.batch}, {mx.device_info().get('device_name', backend())}", flush=True)
        model = random_model(shape, layers=args.layers)
        prompts = make_prompts(model.config.vocab_size, args.batch, args.prompt)
        sizes = {"max_context": args.prompt + 2 * args.tokens, "max_running": max(args.batch, 1), "chunk": 512}
        for graphs in (None, False) if backend() == "cuda" else (None,):
            measure(model, sizes | {"cuda_graphs": graphs}, prompts, args.tokens, args.params)
        if backend() == "cuda":
            print("  with the kernels of a graph, which are less fused:", flush=True)
            with model.kernels.capturing(True):
                measure(model, sizes | {"cuda_graphs": False}, prompts, args.tokens, args.params)
        del model
        mx.clear_cache()


if __name__ == "__main__":
    main()
