"""Decode speed of drawn tokens relative to greedy ones, in one process, in turns.

    python -m bench.gpu.draws SHAPE ... [--batch 1] [--prompt 512] [--ragged] [--tokens 256] [--rounds 5]

Random weights give flat logits, the worst case for top-p. A ratio is the median over rounds of a set's rate and that of
the greedy answer just before it; --ragged gives the rows of a batch prompts of 32 to 993 tokens.
"""

import argparse
import statistics
import time
from typing import Any

import mlxrt  # noqa: F401  before MLX

import mlx.core as mx  # isort: skip

from bench.gpu.shapes import make_prompts, random_model
from mlxrt import Engine, EngineConfig, Request, SamplingParams
from mlxrt.engine.engine import Source

SETS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "temperature + top_p": {"temperature": 0.7, "top_p": 0.9},
    "top_k 20 + top_p 0.95": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "top_k 64 + min_p": {"temperature": 1.0, "top_k": 64, "min_p": 0.05},
    "repetition penalty": {"repetition_penalty": 1.1},
    "repetition penalty + top_p": {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1},
    "presence + frequency": {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    "5 log probabilities": {"logprobs": 5},
    "bias": {"logit_bias": {7: 2.0, 11: -3.0}},
}


def decode_rate(engine: Engine, prompts: list[list[int]], tokens: int, params: dict[str, Any]) -> float:
    """Tokens a second of all rows, from the moment every row has its first."""
    asked = SamplingParams(max_tokens=tokens, ignore_eos=True, **{"seed": 1, **params})
    times: dict[int, list[float]] = {}
    with engine.stream([Request(tokens=tuple(p), params=asked) for p in prompts]) as stream:
        for event in stream:
            if event.token is not None:
                times.setdefault(event.id, []).append(time.perf_counter())
    start = max(at[0] for at in times.values())
    after = [t for at in times.values() for t in at if t > start]
    return len(after) / (max(after) - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+", metavar="SHAPE", help="such as qwen3-8b@4bit")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--ragged", action="store_true", help="prompts of 32 to 993 tokens")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    for shape in args.shapes:
        model = random_model(shape)
        longest = 993 if args.ragged else args.prompt
        prompts = make_prompts(model.config.vocab_size, args.batch, longest)
        if args.ragged:
            prompts = [p[: 32 + 961 * i // max(args.batch - 1, 1)] for i, p in enumerate(prompts)]
        config = EngineConfig(max_context=longest + 2 * args.tokens, chunk=2048, max_running=max(args.batch, 1))
        with Engine(model, config, source=Source(shape)) as engine:
            for params in ({}, *SETS.values()):  # compiles and captures
                for _ in range(2):
                    decode_rate(engine, prompts, min(args.tokens, 80), params)
            print(f"{shape}, {args.batch} rows", flush=True)
            for name, params in SETS.items():
                pairs = [
                    [decode_rate(engine, prompts, args.tokens, which) for which in ({}, params)]
                    for _ in range(args.rounds)
                ]
                ratio = statistics.median(b / a for a, b in pairs)
                rates = [statistics.median(column) for column in zip(*pairs)]
                print(f"  {name:28} {ratio:.3f} of greedy: {rates[1]:8.1f} of {rates[0]:8.1f} tok/s", flush=True)
        del model
        mx.clear_cache()


if __name__ == "__main__":
    main()
