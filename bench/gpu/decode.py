"""Decode and prefill through the engine beside mlx-lm, on the same random weights.

    python -m bench.gpu.decode SHAPE ... [--runs 1x512,32x128] [--rounds 3] [--json FILE] [--profile] [--turn FILE]

The same prompt and greedy tokens: where they first differ, the gap between both choices in our own logits is shown.
Launches are counted in one decode step that is not compiled; bytes are those of the weights a token needs.
With --turn several such processes build side by side and measure one after another (bench/gpu/turn.py).
"""

import argparse
import cProfile
import gc
import importlib
import json
import pstats
import statistics
import time

import mlx.core as mx  # isort: skip
import mlx.nn as nn
from mlx.utils import tree_flatten

from bench.gpu.ops import copy_bandwidth
from bench.gpu.shaped import drawn, fused
from bench.gpu.turn import turn
from mlxrt import EngineConfig, Request, SamplingParams
from mlxrt.engine.engine import Engine, Source
from mlxrt.weights.randomise import packs

RENAMED = {"qwen3_moe": (".mlp.experts.", ".mlp.switch_mlp.")}


def build(shape, mode, context, peer=True):
    """(engine, mlx-lm's model or None)."""
    asked, model = drawn(shape)
    beside = peer_of(asked, tree_flatten(model.parameters())) if peer else None
    fused(model, mode)
    config = EngineConfig(max_context=context, chunk=2048, max_running=64, kernels=mode)
    return Engine(model, config, source=Source(shape)), beside


def peer_of(asked, arrays):
    config = asked.config
    kind = config["model_type"]
    module = importlib.import_module(f"mlx_lm.models.{kind}")
    model = module.Model(module.ModelArgs.from_dict(config))
    if asked.bits:
        predicate = lambda _, m: packs(m, asked.group_size)  # noqa: E731
        nn.quantize(model, asked.group_size, asked.bits, mode=asked.mode, class_predicate=predicate)
    old, new = RENAMED.get(kind, ("", ""))
    named = [(name.replace(old, new) if old else name, a) for name, a in arrays]
    missing = {n for n, _ in tree_flatten(model.parameters())} ^ {n for n, _ in named}
    if missing:
        print("  not the same parameters:", sorted(missing)[:6], len(missing))
    model.load_weights(named, strict=False)
    mx.eval(model.parameters())
    return model


def bytes_read(model) -> int:
    """Of the weights, by one token: all but rows of the embedding it does not ask for and experts it does not use."""
    config, total = model.config, 0
    tied = getattr(config, "tie_word_embeddings", False)
    for name, a in tree_flatten(model.parameters()):
        share = 1.0
        if ".experts." in name or ".switch_mlp." in name:
            share = config.num_experts_per_tok / a.shape[0]
        elif "embed_tokens_per_layer" in name or ("embed_tokens" in name and not tied):
            share = 1 / a.shape[0]
        total += int(a.nbytes * share)
    return total


def launches(model, prompt) -> int:
    """Kernels of ours a greedy token takes, as one graph where there can be one."""
    config = EngineConfig(max_context=128, chunk=64, compile=False, ahead=0, prefix_cache=False)
    gpu = model.kernels.gpu
    if gpu is None:
        return 0
    engine = Engine(model, config, source=Source("counted"))
    with engine, model.kernels.capturing(gpu.library is not None):
        counts = []
        for n in (2, 10):
            before = gpu.launches
            engine.generate(ask(prompt[:8], n))
            counts.append(gpu.launches - before)
    return (counts[1] - counts[0]) // 8


def prompts_of(vocab, batch, length):
    return [[(i * 131 + j * 7 + (j * j) % 11) % (vocab - 10) for j in range(length)] for i in range(batch)]


def ask(tokens, n):
    return Request(tokens=tuple(tokens), params=SamplingParams(max_tokens=n, ignore_eos=True))


def ours(engine, prompts, n, rounds):
    rates, prefills, tokens = [], [], {}
    for _ in range(rounds + 1):  # the first is not counted, of neither
        engine.store.clear()
        began, firsts, times, tokens = time.perf_counter(), {}, [], {}
        with engine.stream([ask(p, n) for p in prompts]) as stream:
            order = list(stream.ids)
            for event in stream:
                times.append(time.perf_counter())
                firsts.setdefault(event.id, times[-1])
                tokens.setdefault(event.id, []).append(event.token)
        start = max(firsts.values())
        prefills.append(sum(map(len, prompts)) / (start - began))
        rates.append(sum(t > start for t in times) / (times[-1] - start))
    return statistics.median(rates[1:]), statistics.median(prefills[1:]), [tokens[i] for i in order]


def theirs(model, prompts, n, rounds):
    from mlx_lm.generate import BatchGenerator, generate_step

    rates, prefills, tokens = [], [], []
    for round in range(rounds + 1):
        began = time.perf_counter()
        if len(prompts) == 1:
            steps = generate_step(mx.array(prompts[0]), model, max_tokens=n)
            tokens = [int(next(steps)[0])]
            start = time.perf_counter()
            tokens += [int(t) for t, _ in steps]
            count, tokens = len(tokens) - 1, [tokens]
        else:
            size = len(prompts)
            made = BatchGenerator(
                model, max_tokens=n, stop_tokens=[], completion_batch_size=size, prefill_batch_size=min(size, 8)
            )
            made.insert(prompts, [n] * size)
            seen, start, count = {}, None, 0
            while rows := made.next_generated():
                for r in rows:
                    seen[r.uid] = seen.get(r.uid, 0) + 1
                    count += start is not None
                if start is None and len(seen) == size:
                    start = time.perf_counter()
            made.close()
        spent = time.perf_counter() - start
        if round:
            rates.append(count / spent)
            prefills.append(sum(map(len, prompts)) / (start - began))
    return statistics.median(rates), statistics.median(prefills), tokens


def agreement(engine, prompt, a, b, n=32):
    """How many of the first n tokens agree, and by how much ours prefers its own where they part."""
    for i, (x, y) in enumerate(zip(a[:n], b[:n])):
        if x != y:
            row = engine.score([*prompt, *a[:i]])[-1]
            return i, float((row[x] - row[y]).item()), float((row.max() - row.mean()).item())
    return n, 0.0, 0.0


def profile(engine, prompt):
    watch = cProfile.Profile()
    list(engine.generate(ask(prompt, 64)).tokens)
    watch.enable()
    engine.generate(ask(prompt, 128))
    watch.disable()
    pstats.Stats(watch).sort_stats("tottime").print_stats(22)


def compare(engine, peer, batch, length, args, known):
    """One row of the table."""
    prompts = prompts_of(engine.model.config.vocab_size, batch, length)
    rounds = args.rounds if length < 1024 else 1  # long enough to be measured once
    a = ours(engine, prompts, args.tokens, rounds)
    b = a if args.alone else theirs(peer, prompts, args.tokens, rounds)
    row = dict(known, batch=batch, prompt=length, ours=a[:2], mlx_lm=b[:2])
    row["share"] = a[0] / batch * known["bytes"] / known["copy"]
    if batch == 1:
        row["agreement"] = agreement(engine, prompts[0], a[2][0], b[2][0])
    kernels = engine.model.kernels
    row |= dict(used=kernels.used, fallbacks={"; ".join(k): v for k, v in kernels.fallbacks.items()})
    print(
        f"{known['shape']} batch {batch} prompt {length}: decode {a[0]:.0f} against {b[0]:.0f} ({a[0] / b[0]:.2f}x), "
        f"{row['share']:.0%} of the roof, prefill {a[1]:.0f} against {b[1]:.0f} ({a[1] / b[1]:.2f}x) "
        f"{row.get('agreement', '')}",
        flush=True,
    )
    return row


def measure(shape, args):
    runs = [tuple(map(int, run.split("x"))) for run in args.runs.split(",")]
    began = time.perf_counter()
    engine, peer = build(shape, args.mode, max(n for _, n in runs) + 2 * args.tokens, peer=not args.alone)
    vocab = engine.model.config.vocab_size
    read, count = bytes_read(engine.model), launches(engine.model, prompts_of(vocab, 1, 8)[0])
    if args.turn:  # compile now what will be timed
        for batch in sorted({batch for batch, _ in runs}):
            prompts = prompts_of(vocab, batch, min(n for _, n in runs))
            ours(engine, prompts, 4, 1)
            if not args.alone:
                theirs(peer, prompts, 4, 1)
    print(f"{shape}: ready in {time.perf_counter() - began:.0f} s; {count} launches, {read / 1e6:.0f} MB a token")
    with turn(args.turn):
        known = dict(shape=shape, launches=count, bytes=read, copy=copy_bandwidth())
        print(
            f"{mx.device_info()['device_name']}, MLX {mx.__version__}, copy {known['copy'] / 1e9:.0f} GB/s", flush=True
        )
        rows = [compare(engine, peer, batch, length, args, known) for batch, length in runs]
        if args.profile:
            profile(engine, prompts_of(vocab, 1, 512)[0])
    engine.close()
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+")
    parser.add_argument("--runs", default="1x512", help="batch x prompt, several with commas")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mode", default="auto")
    parser.add_argument("--json")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--alone", action="store_true", help="without mlx-lm beside it")
    parser.add_argument("--turn", help="measure while holding a lock on this file")
    args = parser.parse_args()
    rows = []
    for shape in args.shapes:
        rows += measure(shape, args)
        gc.collect()
        mx.clear_cache()
        if args.json:
            with open(args.json, "w") as f:
                json.dump(rows, f, indent=1)


if __name__ == "__main__":
    main()
