"""The engine on a GPU: right tokens for every kind, no second cache from launching ahead.

    python -m bench.gpu.engine [--json FILE]

Runs on whatever device MLX has. Weights are random, so nothing is downloaded. Speed: `python -m bench.gpu.decode`.
"""

import argparse
import json
import time

import mlx.core as mx

from mlxrt import Engine, EngineConfig, Request, SamplingParams
from tests.support.oracle import logits
from tests.support.toy_models import KINDS, make

quiet = dict()


def ask(tokens, n):
    return Request(tokens=tuple(tokens), params=SamplingParams(max_tokens=n, ignore_eos=True))


def check_tokens():
    """Greedy tokens of every kind against recomputation; where they differ, the gap must be a rounding."""
    worst = {}
    for kind, build in KINDS.items():
        model = build()
        prompts = [tuple(range(5, 12)), (1, 2, 3), tuple(range(40, 63)), (9,)]
        done = Engine(model, EngineConfig(chunk=16)).generate([ask(p, 24) for p in prompts])
        gap = 0.0
        for prompt, c in zip(prompts, done):
            rows = logits(model, (*prompt, *c.tokens))[len(prompt) - 1 : -1]
            chosen = mx.take_along_axis(rows, mx.array(c.tokens)[:, None], axis=1)[:, 0]
            gap = max(gap, (rows.max(axis=1) - chosen).max().item())
        worst[kind] = gap
        assert gap < 2e-2, f"{kind}: a token is {gap} below the best"
    return worst


def check_ahead():
    """Peak memory of decode launched ahead over large pools, a short step: what a second cache would show in."""
    out = []
    for ahead in (0, 1, 2):
        engine = Engine(make("f", size=32), EngineConfig(ahead=ahead))
        held = [g.pool.allocate(8192) for g in engine.groups]
        list(engine.stream(ask(range(8), 2)))
        del held
        pool = sum(p.nbytes for p in engine.pools.arrays[0])
        stream = engine.stream(ask(range(20), 140))
        for _ in range(8):
            next(stream)
        mx.synchronize()
        mx.reset_peak_memory()
        base, began = mx.get_active_memory(), time.perf_counter()
        n = sum(1 for _ in stream)
        out.append(
            dict(
                ahead=ahead,
                pool_mb=pool / 1e6,
                ms_per_token=(time.perf_counter() - began) / n * 1e3,
                peak_mb=(mx.get_peak_memory() - base) / 1e6,
            )
        )
        assert out[-1]["peak_mb"] < pool / 4e6, out[-1]
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    args = parser.parse_args()
    result = {
        "device": str(mx.default_device()),
        "info": {k: str(v) for k, v in mx.device_info().items()},
        "mlx": mx.__version__,
    }
    print(result, flush=True)
    result["worst gap"] = check_tokens()
    print("largest gap below the best token, by kind:", result["worst gap"], flush=True)
    result["ahead"] = check_ahead()
    for row in result["ahead"]:
        print(row, flush=True)
    if args.json:
        with open(args.json, "w") as f:
            json.dump(result, f, indent=1)


if __name__ == "__main__":
    main()
