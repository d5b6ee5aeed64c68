"""Serving beside mlx-lm's BatchGenerator: memory, padding, stalls, waits, throughput, a memory limit, overhead.

    python -m bench.serving [--length 4096] [--rounds 1] [--part memory --part flood ...] [--json FILE]

Both engines run in processes of their own on the same float32 weights with the same BLAS. `memory` and `padding` count
bytes and positions on a model of two layers; `flood` and `cap` run SmolLM2. Exit 0: every judged figure holds.
"""

import argparse
import gc
import json
import random
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import mlxrt  # before MLX, under which it loads a BLAS
from mlxrt import EngineConfig
from mlxrt.bench.export import export
from mlxrt.bench.machine import look_around
from mlxrt.bench.side import Side

from . import scheduler_overhead

VOCAB = 40_000  # of SmolLM2's tokens, those that are text
PARTS = ("memory", "padding", "flood", "cap", "overhead")
TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "max_position_embeddings": 8192, "vocab_size": 512, "hidden_act": "silu",
    "tie_word_embeddings": True,
}  # fmt: skip


@dataclass(frozen=True)
class Load:
    first: list[list[int]]
    then: list[list[int]]
    last: list[list[int]]
    max_tokens: list[int]
    after: int = 4
    chunk: int | None = None
    stall: int | None = None

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, (*self.first, *self.then, *self.last)))

    def ask(self) -> dict[str, Any]:
        return vars(self).copy()


class Judged:
    """Figures, each with what is wanted of it."""

    def __init__(self) -> None:
        self.good, self.found = True, {}  # type: bool, dict[str, Any]

    def say(self, name: str, text: str, holds: bool | None = None, **figures: Any) -> None:
        self.found[name] = figures | ({} if holds is None else {"holds": holds})
        self.good &= holds is not False
        print(f"{name}: {text}" + ("" if holds is None else "" if holds else "   DOES NOT HOLD"), flush=True)


def texts(chance: random.Random, vocab: int, *lengths: int) -> list[list[int]]:
    return [[chance.randrange(10, vocab) for _ in range(n)] for n in lengths]


def tiny_folder(folder: Path) -> Path:
    """A model of two layers with random weights, and a tokenizer that mlx-lm can load."""
    import mlx.core as mx

    rng, c = np.random.default_rng(0), TINY
    hidden, kv = int(str(c["hidden_size"])), 32
    shapes = {"model.embed_tokens.weight": (512, hidden), "model.norm.weight": (hidden,)}
    for i in range(2):
        at = f"model.layers.{i}."
        shapes |= {
            at + f"self_attn.{n}_proj.weight": (d, hidden) for n, d in (("q", 64), ("k", kv), ("v", kv), ("o", 64))
        }
        shapes |= {at + f"mlp.{n}_proj.weight": (128, hidden) for n in ("gate", "up")}
        shapes |= {at + "mlp.down_proj.weight": (hidden, 128)}
        shapes |= {at + n + ".weight": (hidden,) for n in ("input_layernorm", "post_attention_layernorm")}
    weights = {
        name: mx.array(np.ones(s) if len(s) == 1 else rng.normal(0, 0.2, s), mx.float32) for name, s in shapes.items()
    }
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(c))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((export("plain") / file).read_bytes())
    return folder


def memory(judged: Judged, tiny: Path) -> None:
    chance = random.Random(1)
    load = Load(texts(chance, 512, 6000, *[32] * 7), [], [], [4, *[120] * 7])
    ours, theirs = both(tiny, load)
    token = 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, numbers, bytes
    a, b = (side["held"] / (side["there"] * token) for side in (ours, theirs))
    text = f"one 6,000- and seven 32-token streams hold {a:.3f} x their tokens (mlx-lm {b:.1f} x; at most 1.05)"
    judged.say("KV bytes", text, a <= 1.05, ours=a, mlx_lm=b)


def padding(judged: Judged, tiny: Path) -> None:
    chance = random.Random(2)
    load = Load(texts(chance, 512, 2000, *[50] * 7), [], [], [1] * 8)
    ours, theirs = both(tiny, load)
    a, b = ours["positions"] / load.prompt_tokens, theirs["positions"] / load.prompt_tokens
    text = f"one 2,000- and seven 50-token prompts compute {a:.3f} x their tokens (mlx-lm {b:.1f} x; at most 1.02)"
    judged.say("positions", text, a <= 1.02, ours=a, mlx_lm=b)


def flood(judged: Judged, length: int, rounds: int) -> None:
    """Long prompts arrive while a stream runs, and a short one after them."""
    folder, waits, rates, equal = export("plain"), [], [], 0
    for k in range(rounds):
        chance = random.Random(10 + k)
        n = 24 + 8 * length // 128  # the stream outlasts the flood
        load = Load(
            texts(chance, 40_000, 40), texts(chance, 40_000, *[length] * 8), texts(chance, 40_000, 20), [n, *[8] * 9]
        )
        ours, theirs = both(folder, load)
        equal += ours["tokens"] == theirs["tokens"]
        waits.append((ours["first"][-1], theirs["first"][-1]))
        work = load.prompt_tokens + sum(load.max_tokens)
        rates.append((work / ours["seconds"], work / theirs["seconds"]))
    text = f"{ours['stall']} prompt tokens between two of a stream (bound {ours['bound']}; mlx-lm {theirs['stall']})"
    judged.say("stall", text, ours["stall"] <= ours["bound"], ours=ours["stall"], mlx_lm=theirs["stall"])
    judged.say("longest gap", f"{ours['gap']:.2f} s between two tokens of the stream (mlx-lm {theirs['gap']:.2f} s)")
    a, b = (statistics.median(x) for x in zip(*waits))
    text = f"first token of the short request after {a:.2f} s (mlx-lm {b:.2f} s; at most half of it)"
    judged.say("short request", text, a <= b / 2, ours=a, mlx_lm=b)
    a, b = (statistics.median(x) for x in zip(*rates))
    judged.say("throughput", f"{a:.1f} tokens/s in all (mlx-lm {b:.1f}; not below it)", a >= b, ours=a, mlx_lm=b)
    print(f"all tokens equal in {equal} of {rounds} rounds")


def both(folder: Path, load: Load) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same load on both, one after the other."""
    found = []
    for name in ("ours_batch", "mlx_lm_batch"):
        with Side(name, {"folder": str(folder)}, program=f"bench.sides.{name}") as side:
            found.append(side.ask(**load.ask()))
    return found[0], found[1]


def cap(judged: Judged) -> None:
    """Sixty per cent of the keys and values a load wants."""
    import mlx.core as mx

    chance = random.Random(3)
    prompts = texts(chance, 40_000, *[200] * 8)
    requests = [
        mlxrt.Request(tokens=tuple(p), params=mlxrt.SamplingParams(max_tokens=24, ignore_eos=True)) for p in prompts
    ]
    folder = str(export("plain"))
    with mlxrt.load(folder, EngineConfig(max_running=8, prefix_cache=False)) as engine:
        want = [d.tokens for d in engine.generate(requests)]
        wanted = sum(engine.cost(r).kv for r in requests)
        weights = engine.budget.weights
    del engine
    gc.collect()  # an engine refers to itself, and its weights are large
    with mlxrt.load(folder, EngineConfig(max_running=8, chunk=64, kv_memory=int(0.6 * wanted))) as engine:
        limit = engine.budget.total
    del engine
    gc.collect()
    with mlxrt.load(folder, EngineConfig(max_running=8, chunk=64, memory=limit)) as engine:
        mx.reset_peak_memory()
        got = [d.tokens for d in engine.generate(requests)]
        stats = engine.stats()
    share, peak = stats.kv_limit / wanted, stats.peak_memory / limit
    equal = sum(a == b for a, b in zip(got, want))
    text = (
        f"8 requests want {wanted / 1e6:.0f} MB of keys and values beside {weights / 1e6:.0f} MB of weights and get "
        f"{100 * share:.0f} % of it: {len(got)} complete, {equal} equal to the free run, "
        f"{stats.preemptions} preemptions, peak {peak:.3f} x the limit (at most 1.05)"
    )
    holds = got == want and peak <= 1.05 and share < 0.7
    judged.say("memory limit", text, holds, peak=peak, share=share, preemptions=stats.preemptions)


def overhead(judged: Judged) -> None:
    found = statistics.median(scheduler_overhead.measure("window and full", 256, 100, True))
    text = f"{found:.1f} us of CPU time per sequence and step, 256 running (at most 50)"
    judged.say("plan and commit", text, found < 50, ours=found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=4096, help="tokens of each of the eight long prompts")
    parser.add_argument("--rounds", type=int, default=1, help="rounds of the flood")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this part (may be repeated)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args()
    parts, judged = options.part or PARTS, Judged()
    print(f"before: {look_around()}")
    try:
        with tempfile.TemporaryDirectory() as name:
            tiny = tiny_folder(Path(name)) if {"memory", "padding"} & set(parts) else Path(name)
            for part in PARTS:
                if part in parts:
                    run_part(part, judged, tiny, options)
    except mlxrt.MlxrtError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"after: {look_around()}")
    if options.json:
        options.json.write_text(json.dumps(judged.found, indent=1), encoding="utf-8")
    print("every judged figure holds" if judged.good else "NOT every judged figure holds")
    return 0 if judged.good else 1


def run_part(part: str, judged: Judged, tiny: Path, options: argparse.Namespace) -> None:
    if part in ("memory", "padding"):
        (memory if part == "memory" else padding)(judged, tiny)
    elif part == "flood":
        flood(judged, options.length, options.rounds)
    else:
        (cap if part == "cap" else overhead)(judged)


if __name__ == "__main__":
    sys.exit(main())
