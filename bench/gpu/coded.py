"""Logits after a long prompt whose keys and values are kept as codes: within what docs/decisions/0013 allows?

    python -m bench.gpu.coded [--shape qwen3-8b@4bit] [--layers 4] [--tokens 32768] [--batch 1] [--kinds full,q8,q4]

In float32, where rounding hides nothing: kernels against plain MLX over codes of the same kind, and each kind against
full ones. Every row is told its next tokens, so that all paths see the same ones; steps after the first are decode
steps. Rows of a batch differ in length and in their last 40 tokens and share what is before, since plain MLX takes its
time for a prompt in float32. Exit 1 where a distance is beyond what is allowed.
"""

import os
import sys

os.environ.setdefault("MLX_ENABLE_TF32", "0")  # before MLX: plain MLX is the truth here

import argparse
import time

import mlx.core as mx

from bench.gpu.shaped import drawn, fused
from mlxrt import EngineConfig, Request, SamplingParams
from mlxrt.engine.engine import Engine, Source

STEPS = 4
SAME = 5e-5  # kernels and plain MLX, any kind: root mean square, relative to the logits'
LAYER = {"q8": 0.015, "k8v4": 0.2, "q4": 0.25}  # a kind and full ones, for the square root of the layers


def prompts_of(vocab, batch, length):
    """The longest first; each has the beginning of the stem and an end of its own."""
    stem = [(j * 7 + (j * j) % 11) % (vocab - 10) for j in range(length)]
    return [stem[: length - 40 - 517 * i] + [(i * 131 + j * 3) % 1000 for j in range(40)] for i in range(batch)]


def logits(model, mode, kind, prompts, args):
    """[rows, STEPS, V]: after the prompt, then after every token that the row is told; the kernels that ran."""
    layers = model.config.num_hidden_layers
    context = args.tokens + 4 * STEPS
    room = len(prompts) * (context + 2048) * layers * 16384
    config = EngineConfig(
        kv=kind, max_context=context, chunk=2048, max_running=len(prompts), kv_memory=room, kernels=mode
    )
    seen, before = [[] for _ in prompts], dict(model.kernels.used)

    def told(i):
        def on_logits(row):
            seen[i].append(mx.array(row.logits))
            mx.eval(seen[i][-1])
            row.allow([(17 * i + 5 * len(seen[i])) % 1000])

        return on_logits

    params = SamplingParams(max_tokens=STEPS, ignore_eos=True)
    with Engine(model, config, source=Source(kind)) as engine:
        engine.generate(Request(tokens=tuple(prompts[0]), params=SamplingParams(max_tokens=1)))  # the others' beginning
        engine.generate([Request(tokens=tuple(p), params=params, on_logits=told(i)) for i, p in enumerate(prompts)])
        used = {name for name, calls in model.kernels.used.items() if calls > before.get(name, 0)}
    return mx.stack([mx.stack(rows) for rows in seen]), used


def distance(a, b):
    """Root mean square of the worst row, relative to that row's own."""
    off = mx.sqrt(mx.square(a - b).mean(axis=-1)) / mx.sqrt(mx.square(b).mean(axis=-1))
    return off.max().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-8b@4bit")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--kinds", default="full,q8,q4")
    args = parser.parse_args()
    kinds = args.kinds.split(",")
    if kinds[0] != "full" or not set(kinds[1:]) <= set(LAYER):
        parser.error(f"--kinds begins with full and goes on with {', '.join(LAYER)}")
    found, wrong = {}, 0
    for mode in ("auto", "reference"):
        model = fused(drawn(args.shape, mx.float32, args.layers)[1], mode)
        prompts = prompts_of(model.config.vocab_size, args.batch, args.tokens)
        for kind in kinds:
            began = time.perf_counter()
            found[mode, kind], used = logits(model, mode, kind, prompts, args)
            if mode == "auto" and not any(name.startswith("attend") for name in used):
                wrong += 1
                print(f"{kind}: attention was no kernel's: plain MLX is compared with itself", flush=True)
            print(f"{mode}, {kind}: {time.perf_counter() - began:.0f} s", flush=True)
        layers = model.config.num_hidden_layers
        del model
        mx.clear_cache()
    for kind in kinds:
        same = distance(found["auto", kind], found["reference", kind])
        cost = distance(found["auto", kind], found["auto", "full"])
        allowed = LAYER.get(kind, 0.0) * layers**0.5
        wrong += not (same <= SAME and cost <= allowed)
        print(
            f"{kind}, {args.batch} x {args.tokens} tokens, {layers} layers: kernels {same:.1e} off plain MLX "
            f"(allowed {SAME:.0e}), {cost:.1e} off full (allowed {allowed:.1e})",
            flush=True,
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
