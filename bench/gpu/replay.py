"""Decode steps launched as one graph, beside the same steps launched by MLX: the same tokens, and how fast.

    python -m bench.gpu.replay [SHAPE ...] [--programs 20] [--seed 1] [--kv full,q8]

Both engines hold one model and get the same requests in the same order, so every token has to be equal: the kernels
are the same. A program is requests of many lengths, greedy and drawn, that arrive, end and are given up at any time.
Exit 1 on a difference, or where no step was launched as a graph.
"""

import argparse
import random
import sys
import time

import mlxrt  # noqa: F401  before MLX

import mlx.core as mx  # isort: skip

from bench.gpu.decode import ask, prompts_of
from bench.gpu.shaped import drawn, fused
from mlxrt import EngineConfig, Request, SamplingParams
from mlxrt.engine.engine import Engine, Source


def engines(model, kv: str, context: int):
    """(by graphs, by MLX)."""
    config = EngineConfig(max_context=context, chunk=2048, max_running=64, kv=kv)
    graphs, plain = (Engine(model, config, source=Source("replay")) for _ in range(2))
    if (replay := plain.runner.replay) is not None:
        replay.most = 0  # nothing is recorded: the same kernels, launched by MLX
    return graphs, plain


def program(seed: int, vocab: int) -> list[tuple]:
    """(events of the others before it arrives, tokens read before it is given up or None, request)."""
    draw = random.Random(seed)
    shared = [draw.randrange(vocab) for _ in range(draw.choice((1, 40, 64, 500)))]
    made = []
    for i in range(draw.choice((1, 1, 2, 3, 5, 9))):
        own = [draw.randrange(vocab) for _ in range(draw.randrange(1, 90))]
        n = draw.choice((1, 5, 33, 70, 150))
        hot = draw.random() < 0.15
        params = SamplingParams(max_tokens=n, ignore_eos=True, temperature=0.8 if hot else 0.0, seed=seed + i)
        left = draw.randrange(1, n + 1) if draw.random() < 0.2 else None
        made.append((draw.choice((0, 0, 7, 40)), left, Request(tokens=tuple(shared + own), params=params)))
    return made


def play(engine: Engine, requests: list[tuple]) -> list[list[int]]:
    """Their tokens. Streams are read in turn, one event each."""
    waiting, open_, answers = list(enumerate(requests)), {}, {i: [] for i in range(len(requests))}
    clock = 0
    while waiting or open_:
        while waiting and (clock >= waiting[0][1][0] or not open_):
            i, (_, left, request) = waiting.pop(0)
            open_[i] = engine.stream([request]), left
        for i, (stream, left) in list(open_.items()):
            clock += 1
            event = next(stream, None)
            if event is not None:
                answers[i].append(event.token)
            if event is None or len(answers[i]) == left:
                stream.close()
                del open_[i]
    return list(answers.values())


def speed(engine: Engine, prompt: list[int], n: int = 192) -> float:
    rates = []
    for _ in range(3):
        engine.store.clear()
        with engine.stream([ask(prompt, n)]) as stream:
            next(stream)
            began = time.perf_counter()
            count = sum(1 for _ in stream)
        rates.append(count / (time.perf_counter() - began))
    return sorted(rates)[1]


def compare(model, shape: str, kv: str, args) -> int:
    """How many programs have other tokens; 1 if no step was launched as a graph."""
    graphs, plain = engines(model, kv, 1024)
    vocab = model.config.vocab_size
    if graphs.runner.replay is None:
        print(f"{shape}, {kv}: steps cannot be launched as graphs here")
        return 1
    wrong = tokens = 0
    for seed in range(args.seed, args.seed + args.programs):
        requests = program(seed, vocab)
        a, b = play(graphs, requests), play(plain, requests)
        tokens += sum(map(len, a))
        if a != b:
            wrong += 1
            parts = [next((i for i, (p, q) in enumerate(zip(x, y)) if p != q), None) for x, y in zip(a, b)]
            print(f"{shape}, {kv}, program {seed}: they part at {parts}")
    steps = graphs.runner.replay.steps
    print(
        f"{shape}, {kv}: {args.programs} programs, {tokens} tokens, {steps} steps as graphs, {wrong} differ", flush=True
    )
    prompt = prompts_of(vocab, 1, 512)[0]
    rates = [speed(engine, prompt) for engine in (graphs, plain, graphs, plain)]
    print(
        f"{shape}, {kv}: {rates[0]:.0f}, {rates[2]:.0f} tok/s as graphs, {rates[1]:.0f}, {rates[3]:.0f} by MLX",
        flush=True,
    )
    for engine in (graphs, plain):
        engine.close()
    return wrong if steps else 1


def main(compare=compare, text=__doc__) -> int:
    """`compare` for every shape and kind of keys and values that was asked for."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=["qwen3-0.6b@4bit"])
    parser.add_argument("--programs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kv", default="full", help="kinds of keys and values, full,q8,q4")
    args = parser.parse_args()
    wrong = 0
    for shape in args.shapes:
        model = fused(drawn(shape)[1])
        wrong += sum(compare(model, shape, kv, args) for kv in args.kv.split(","))
        mx.clear_cache()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
