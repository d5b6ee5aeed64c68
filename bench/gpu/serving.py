"""The flood of bench/serving.py on a GPU: long prompts arrive while a stream runs, then a short one.

    python -m bench.gpu.serving [--shape qwen3-0.6b@4bit] [--length 4096] [--json FILE]

Weights are random and of one shape; BatchGenerator gets the same prompts in the same process, afterwards. Also
prints the line that the choice of `chunk` gives at load. Decode rates by batch: `python -m bench.gpu.decode`.
"""

import argparse
import gc
import json
import random
from pathlib import Path
from typing import Any

import mlxrt  # before MLX, under which it loads a BLAS
from bench.serving import Load, texts
from bench.sides import mlx_lm_batch, ours_batch


def ours(shape: str, load: Load) -> dict[str, Any]:
    with mlxrt.load(f"shape:{shape}") as engine:
        warm = Load(load.first, [p[:64] for p in load.then], load.last, load.max_tokens)
        ours_batch.play(engine, warm.ask())
        return ours_batch.play(engine, load.ask())


def theirs(shape: str, load: Load) -> dict[str, Any]:
    import mlx.core as mx
    import mlx.nn as nn
    from mlx_lm.generate import BatchGenerator
    from mlx_lm.models import qwen3

    from mlxrt.weights.random_models import Shape, shape_config

    asked = Shape.parse(f"shape:{shape}")
    model = qwen3.Model(qwen3.ModelArgs.from_dict(shape_config(asked.name)))
    model.set_dtype(mx.bfloat16)
    if asked.bits:
        nn.quantize(model, group_size=asked.group_size, bits=asked.bits)
    mx.eval(model.parameters())
    counted = mlx_lm_batch.Counted(model)
    warm = Load(load.first, [p[:64] for p in load.then], load.last, load.max_tokens)
    mlx_lm_batch.play(counted, warm.ask(), BatchGenerator(counted))
    return mlx_lm_batch.play(counted, load.ask(), BatchGenerator(counted))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-0.6b@4bit")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    chance = random.Random(5)
    first, then, last = (texts(chance, 100_000, *n) for n in ([40], [options.length] * 8, [20]))
    load = Load(first, then, last, [400, *[8] * 9])
    found = {"mlxrt": ours(options.shape, load)}
    gc.collect()
    found["mlx-lm"] = theirs(options.shape, load)
    work = load.prompt_tokens + sum(load.max_tokens)
    for name, side in found.items():
        del side["tokens"]
        print(
            f"{name}: most prompt tokens between two of the stream {side['stall']} (bound {side['bound']}), longest "
            f"gap {1e3 * side['gap']:.0f} ms, short request's first token {1e3 * side['first'][-1]:.0f} ms, "
            f"{work / side['seconds']:.0f} tokens/s in all"
        )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
