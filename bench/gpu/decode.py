"""Decode and prefill of published shapes with random weights: mlxrt, mlx-lm and another checkout of mlxrt, interleaved.

    python -m bench.gpu.decode SHAPE ... [--runs 1x512,32x128] [--tokens 128] [--rounds 3] [--before FOLDER]
        [--kv full,q8] [--max-kv-size N] [--launches] [--warm] [--no-peer] [--json FILE]

Every engine is a backend of `mlxrt bench`. All of them load and compile side by side (MLX takes 40 s for gather_qmm
alone, in every process), then measure one at a time, in turn. `--before` is the folder of an older checkout, `--kv`
adds engines with other KV cache kinds, `--max-kv-size` one with a window, `--launches` one without CUDA graphs;
`--warm` keeps the prompts cached, so that only the first round prefills them. Greedy tokens are compared with mlxrt's:
the first difference and its gap in our logits are printed. So is what the engines log: one without its kernels is no
measure.
"""

import argparse
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.gpu.shapes import make_prompts
from mlxrt.bench.backend import Backend
from mlxrt.bench.bench_model import BenchModel
from mlxrt.bench.interleave import Interleave, Reply, Rounds
from mlxrt.bench.result import OURS
from mlxrt.bench.statistics import Spread, StoppingRule, paired_ratio
from mlxrt.bench.tokens import first_difference

# Where mlxrt's backend is, in this checkout and in older ones.
PROGRAMS = ("mlxrt.bench.backends.mlxrt", "mlxrt.bench.sides.ours")


@dataclass
class Engine:
    """A backend with a configuration; several engines may share a backend."""

    name: str
    backend: Backend
    config: dict[str, Any]

    def run(self, prompts: list[list[int]], tokens: int, warm: bool, r: int) -> Reply:
        """rows: [{tokens, at}], times from the start of the batch."""
        config = {"config": self.config} if self.config else {}
        if len(prompts) == 1:
            question = {"prompt": prompts[0], "max_tokens": tokens, "fresh": not warm}
            return {"rows": [self.backend.ask(do="generate", **question, **config)]}
        requests = [{"prompt": p, "max_tokens": tokens, "after": 0.0} for p in prompts]
        return self.backend.ask(do="batch", requests=requests, **config, **({"fresh": False} if warm else {}))


def start_engines(shape: str, context: int, args: argparse.Namespace) -> list[Engine]:
    sizes = {"max_context": context, "chunk": 2048, "max_running": 64}
    setting = {"model": f"shape:{shape}", "config": sizes}
    starts = {OURS: partial(Backend, OURS, setting)}
    if args.before:
        files = {program: args.before / (program.replace(".", "/") + ".py") for program in PROGRAMS}
        program = next(program for program, file in files.items() if file.exists())
        starts["before"] = partial(Backend, "before", setting, program=program, checkout=args.before)
    if not args.no_peer:
        starts["mlx-lm"] = partial(Backend, "mlx-lm", {"shape": f"shape:{shape}"})
    with ThreadPoolExecutor(len(starts)) as pool:
        backends = dict(zip(starts, pool.map(lambda start: start(), starts.values())))
    engines = [Engine(name, backend, {}) for name, backend in backends.items()]
    kinds = [kind for kind in args.kv.split(",") if kind != "full"]
    others = {f"{OURS} {kind}": {"kv": kind} for kind in kinds}
    if args.max_kv_size:
        others[f"{OURS} max_kv_size {args.max_kv_size}"] = {"max_kv_size": args.max_kv_size}
    if args.launches:
        others[f"{OURS} without graphs"] = {"cuda_graphs": False}
    return engines + [Engine(name, backends[OURS], sizes | changes) for name, changes in others.items()]


def decode_rate(reply: Reply) -> float:
    """Tokens a second of all rows, from the moment every row has its first."""
    start = max(row["at"][0] for row in reply["rows"])
    times = [t for row in reply["rows"] for t in row["at"] if t > start]
    return len(times) / (max(times) - start)


def prefill_rate(reply: Reply, tokens: int) -> float:
    return tokens / max(row["at"][0] for row in reply["rows"])


def warm_up(engines: list[Engine], runs: list[tuple[int, int, int]], vocab: int, args: argparse.Namespace) -> None:
    """Compile what will be timed."""
    for engine in engines:
        for batch, length in sorted({batch: length for batch, length, _ in reversed(runs)}.items()):
            engine.run(make_prompts(vocab, batch, length), 4, args.warm, -1)


def measure(shape: str, engines: list[Engine], run: tuple[int, int, int], copy: float, args: Any) -> Iterator[dict]:
    """One row of the table an engine."""
    batch, length, tokens = run
    vocab = engines[0].backend.info["vocab"]
    prompts = make_prompts(vocab, batch, length)
    timed = {engine.name: partial(engine.run, prompts, tokens, args.warm) for engine in engines}
    rule = StoppingRule(min_rounds=args.rounds, max_rounds=args.rounds)
    rounds: Rounds = Interleave(rule).run(timed, [decode_rate])
    decode = rounds.values(decode_rate)
    prefill = rounds.values(partial(prefill_rate, tokens=batch * length))
    cost = BenchModel.find(f"shape:{shape}").cost
    ours = rounds.replies[OURS][-1]["rows"][0]["tokens"]
    for name in timed:
        row: dict[str, Any] = {"shape": shape, "batch": batch, "prompt": length, "engine": name}
        row |= {"decode": Spread.of(decode[name]).median, "prefill": Spread.of(prefill[name]).median}
        row["values"] = {"decode": decode[name], "prefill": prefill[name]}
        text = f"{shape} {batch} x {length} {name:12} decode {row['decode']:8.1f}, prefill {row['prefill']:9.1f} tok/s"
        if batch == 1:
            row["roofline_share"] = row["decode"] * cost.bytes_at(length + tokens // 2) / copy
            text += f", {row['roofline_share']:.0%} of roofline"
        if name != OURS:
            ratios = [paired_ratio(values[OURS], values[name]) for values in (decode, prefill)]
            row["ours_over_it"] = {"decode": ratios[0].to_dict(), "prefill": ratios[1].to_dict()}
            text += f"; mlxrt over it: decode {ratios[0].value:.3f}, prefill {ratios[1].value:.3f}"
            row["difference"] = difference(engines[0], prompts[0], ours, rounds.replies[name][-1]["rows"][0]["tokens"])
            text += f"; {row['difference']}"
        print(text, flush=True)
        yield row


def difference(engine: Engine, prompt: list[int], ours: list[int], theirs: list[int]) -> str:
    i = first_difference(ours, theirs)
    if i is None:
        return f"{len(ours)} tokens equal"
    gap = engine.backend.ask(do="gap", prompt=[*prompt, *ours[:i]], pair=[ours[i], theirs[i]])
    return f"differs at token {i}, gap {gap:.3g}"


def parse_run(text: str, tokens: int) -> tuple[int, int, int]:
    """Rows, tokens of a prompt, and tokens of an answer."""
    batch, length, *own = map(int, text.split("x"))
    return batch, length, own[0] if own else tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+", metavar="SHAPE", help="such as qwen3-8b@4bit")
    parser.add_argument("--runs", default="1x512", help="batch x prompt, or batch x prompt x tokens")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="another checkout of mlxrt to compare with")
    parser.add_argument("--kv", default="full", help="KV cache kinds, such as full,q8,q4")
    parser.add_argument("--max-kv-size", type=int, metavar="N", help="also with a window of N tokens")
    parser.add_argument("--launches", action="store_true", help="also without CUDA graphs, kernel by kernel")
    parser.add_argument("--warm", action="store_true", help="keep the prompts cached")
    parser.add_argument("--no-peer", action="store_true", help="without mlx-lm")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    runs = [parse_run(run, args.tokens) for run in args.runs.split(",")]
    context = max(length + 2 * tokens for _, length, tokens in runs)
    rows = []
    with Backend("peak", {"seconds": 1.0}) as peak:
        copy = peak.info["copy_bytes_per_s"]
    # Old versions took the mark of a kernel test that another process of theirs was running for a crash, and ran
    # without that kernel: theirs start one after another.
    with ThreadPoolExecutor(1 if args.before else len(args.shapes)) as pool:

        def start(shape: str) -> list[Engine]:
            engines = start_engines(shape, context, args)
            warm_up(engines, runs, engines[0].backend.info["vocab"], args)
            for backend in {id(e.backend): e.backend for e in engines}.values():
                print("".join(f"{shape} {backend.name}: {line}\n" for line in backend.read_log()), end="", flush=True)
            return engines

        started = dict(zip(args.shapes, pool.map(start, args.shapes)))
    print(f"{started[args.shapes[0]][0].backend.info['device_name']}, copy {copy / 1e9:.0f} GB/s", flush=True)
    for shape, engines in started.items():
        for run in runs:
            rows += measure(shape, engines, run, copy, args)
            if args.json:
                args.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
        for backend in {id(e.backend): e.backend for e in engines}.values():
            backend.kill()


if __name__ == "__main__":
    main()
