"""Decoding after a long prompt with keys and values kept in bfloat16, 8 and 4 bit: Qwen3-8B-shaped, random weights.

    python -m bench.gpu.context [--tokens 32768] [--layers 36] [--batch 1] [--kinds full,q8,q4] [--rounds 7]
        [--json F] [--turn F]

What coded ones do to the logits: bench/gpu/coded.py.
"""

import argparse
import json
import statistics
import time
from contextlib import ExitStack

from bench.gpu.decode import ask, prompts_of
from bench.gpu.shaped import drawn, fused
from bench.gpu.turn import turn
from mlxrt import EngineConfig
from mlxrt.engine.engine import Engine, Source


def read(engine, prompts):
    """Prompt tokens a second. Prompts are read once, one after another: decoding begins where they ended."""
    began = time.perf_counter()
    for p in prompts:
        engine.generate(ask(p, 1))
    speed = sum(map(len, prompts)) / (time.perf_counter() - began)
    engine.generate([ask(p, 8) for p in prompts])  # everything is compiled by then
    return speed


def decode(engine, prompts, new):
    """Tokens a second of all rows."""
    firsts, ends, count = {}, {}, 0
    with engine.stream([ask(p, new) for p in prompts]) as stream:
        for event in stream:
            firsts.setdefault(event.id, time.perf_counter())
            ends[event.id] = time.perf_counter()
            count += len(firsts) == len(prompts)
    return (count - 1) / (max(ends.values()) - max(firsts.values()))


def compare(layers, args):
    """A row for each kind of cache; their rounds take turns, so that a slow moment of the machine meets all of them."""
    model = fused(drawn("qwen3-8b@4bit", layers=layers)[1])
    prompts = prompts_of(model.config.vocab_size, args.batch, args.tokens)
    rows = []
    context = args.tokens + 2 * args.new
    room = args.batch * (context + 4096) * layers * 4096 * 5 // 4  # bytes a token and layer in bfloat16
    with ExitStack() as opened:
        engines = []
        for kind in args.kinds.split(","):
            config = EngineConfig(kv=kind, max_context=context, chunk=2048, max_running=args.batch, kv_memory=room)
            engines.append(opened.enter_context(Engine(model, config, source=Source(kind))))
            row = dict(kind=kind, batch=args.batch, tokens=args.tokens, layers=layers)
            rows.append(row | dict(prefill=read(engines[-1], prompts), speeds=[]))
        for _ in range(args.rounds):
            for row, engine in zip(rows, engines):
                row["speeds"].append(decode(engine, prompts, args.new))
    for row in rows:
        ratios = sorted(mine / first for mine, first in zip(row["speeds"], rows[0]["speeds"]))
        row |= dict(decode=statistics.median(row["speeds"]), ratio=statistics.median(ratios))
        print(
            f"{row['kind']}: batch {args.batch}, {args.tokens} tokens, {layers} layers: decode {row['decode']:.1f} "
            f"tok/s, {row['ratio']:.3f}x of {rows[0]['kind']} ({ratios[0]:.3f} to {ratios[-1]:.3f} in {args.rounds} "
            f"rounds), prefill {row['prefill']:.0f}",
            flush=True,
        )
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--kinds", default="full,q8,q4")
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json")
    parser.add_argument("--turn", help="measure while holding a lock on this file")
    args = parser.parse_args()
    if args.turn:
        once = argparse.Namespace(**vars(args) | {"rounds": 1})
        compare(1, once)  # compile now what will be timed: kernels do not ask how many layers there are
    with turn(args.turn):
        rows = compare(args.layers, args)
    if args.json:
        with open(args.json, "w") as f:
            json.dump(rows, f, indent=1)


if __name__ == "__main__":
    main()
