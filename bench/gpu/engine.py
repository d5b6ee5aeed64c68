"""The engine on a GPU: right tokens for every kind, no second cache from launching ahead, speed beside mlx-lm.

    python -m bench.gpu.engine [--json FILE]

Runs on whatever device MLX has. Weights are random, so nothing is downloaded; mlx-lm gets a model of the same shape
and bits, and the same prompt tokens.
"""

import argparse
import gc
import json
import statistics
import time

import mlx.core as mx
import mlx.nn as nn

import mlxrt  # before MLX
from mlxrt import Engine, EngineConfig, Request, SamplingParams
from tests.models.toy import KINDS, make
from tests.oracle import logits

quiet = dict(say=lambda line: None)


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
        held = [g.pool.take(8192) for g in engine.groups]
        list(engine.stream(ask(range(8), 2)))
        del held
        pool = sum(p.nbytes for p in engine.runner.pools[0])
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


def ours(shape, batch, prompt, n):
    engine = mlxrt.load(f"shape:{shape}", EngineConfig(max_running=max(batch, 1)), **quiet)
    vocab = engine.model.config.vocab_size
    prompts = [[(i * 131 + j * 7) % (vocab - 10) for j in range(prompt)] for i in range(batch)]
    engine.generate([ask(p[:32], 40) for p in prompts])
    rates, prefills = [], []
    for _ in range(3):
        engine.store.clear()
        began = time.perf_counter()
        firsts, ends, count = {}, {}, 0
        with engine.stream([ask(p, n) for p in prompts]) as stream:
            for event in stream:
                count += 1
                firsts.setdefault(event.id, time.perf_counter())
                ends[event.id] = time.perf_counter()
        start = max(firsts.values())
        prefills.append(batch * prompt / (start - began))
        rates.append(batch * (n - 1) / (max(ends.values()) - start))
    engine.close()
    del engine
    gc.collect()
    mx.clear_cache()
    return statistics.median(rates), statistics.median(prefills)


def theirs(shape, batch, prompt, n):
    from mlx_lm.generate import BatchGenerator, generate_step
    from mlx_lm.models import qwen3

    from mlxrt.weights.shapes import Shape, shape_config

    asked = Shape.parse(f"shape:{shape}")
    config = shape_config(asked.name)
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16)
    if asked.bits:
        nn.quantize(model, group_size=asked.group_size, bits=asked.bits)
    mx.eval(model.parameters())
    vocab = config["vocab_size"]
    prompts = [[(i * 131 + j * 7) % (vocab - 10) for j in range(prompt)] for i in range(batch)]
    rates, prefills = [], []
    for round in range(4):
        began = time.perf_counter()
        if batch == 1:
            steps = generate_step(mx.array(prompts[0]), model, max_tokens=n)
            next(steps)
            start = time.perf_counter()
            count = sum(1 for _ in steps)
        else:
            made = BatchGenerator(
                model, max_tokens=n, stop_tokens=[], completion_batch_size=batch, prefill_batch_size=min(batch, 8)
            )
            made.insert(prompts, [n] * batch)
            seen, start, count = {}, None, 0
            while rows := made.next_generated():
                for r in rows:
                    seen[r.uid] = seen.get(r.uid, 0) + 1
                    count += start is not None
                if start is None and len(seen) == batch:
                    start = time.perf_counter()
            made.close()
        spent = time.perf_counter() - start
        if round:
            rates.append(count / spent)
            prefills.append(batch * prompt / (start - began))
    del model
    gc.collect()
    mx.clear_cache()
    return statistics.median(rates), statistics.median(prefills)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--shapes", default="qwen3-0.6b@4bit,qwen3-8b@4bit")
    parser.add_argument("--batches", default="1,8,32")
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
    rows = result["speed"] = []
    for shape in args.shapes.split(","):
        for batch in map(int, args.batches.split(",")):
            try:
                a = ours(shape, batch, 512, 64)
                b = theirs(shape, batch, 512, 64)
            finally:
                mx.clear_cache()
            rows.append(
                dict(
                    shape=shape,
                    batch=batch,
                    ours_decode=a[0],
                    ours_prefill=a[1],
                    mlx_lm_decode=b[0],
                    mlx_lm_prefill=b[1],
                )
            )
            print(
                f"{shape} batch {batch}: decode {a[0]:.0f} against {b[0]:.0f} tok/s ({a[0] / b[0]:.2f}x); "
                f"prefill {a[1]:.0f} against {b[1]:.0f} ({a[1] / b[1]:.2f}x)",
                flush=True,
            )
            if args.json:
                with open(args.json, "w") as f:
                    json.dump(result, f, indent=1)


if __name__ == "__main__":
    main()
