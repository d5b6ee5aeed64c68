"""What structured output costs: tokens a second of rows that are held to a JSON schema, and of the free rows beside
them, against the same rows all free. Taken in turns; CPU time is what to trust on a busy machine.

    python -m bench.grammar_cost --model smollm2 --rows 8 --tokens 64 --runs 5
    python -m bench.grammar_cost --model shape:llama-3.1-8b@4bit --tokenizer smollm2 --rows 8 --tokens 256

Answers are drawn at temperature 1. The schema is a list that cannot end before the answer is cut.
"""

import argparse
import statistics
import time
from collections import defaultdict
from dataclasses import replace

import mlxrt
from mlxrt import Completion, Engine, EngineConfig, Request, SamplingParams
from mlxrt.engine.load import open_model

ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "colour": {"enum": ["red", "green", "blue"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 9999},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{2,9}$"}, "maxItems": 3},
    },
    "required": ["name", "colour", "size", "tags"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": ITEM, "minItems": 2000}
FORM = {"type": "json_schema", "schema": SCHEMA}


def open_engine(model: str, tokenizer: str | None) -> Engine:
    """A shape has no tokenizer of its own: that of another model serves, for the time it takes."""
    opened = open_model(model, EngineConfig(prefix_cache=False))
    if tokenizer is not None:
        opened = replace(opened, tokenizer=open_model(tokenizer, EngineConfig()).tokenizer)
    return opened.load()


def ask(row: int, held: bool, tokens: int, seed: int) -> Request:
    params = SamplingParams(max_tokens=tokens, temperature=1.0, seed=1000 * seed + row, ignore_eos=not held)
    return Request(prompt=f"List {row + 2} things as JSON:", params=params, response_format=FORM if held else None)


def measure(engine: Engine, rows: int, held: int, tokens: int, seed: int) -> dict[str, float]:
    """Tokens a second of a held row, of a free row, and of all a second of CPU time."""
    began = time.process_time()
    done: list[Completion] = engine.generate([ask(row, row < held, tokens, seed) for row in range(rows)])
    spent = time.process_time() - began
    assert all(len(c.tokens) == tokens for c in done), [len(c.tokens) for c in done]
    speeds = [c.timings.decode_tps for c in done]
    found = {"CPU": rows * tokens / spent}
    found |= {"held": statistics.mean(speeds[:held])} if held else {}
    return found | ({"free": statistics.mean(speeds[held:])} if held < rows else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokenizer", help="a model whose tokenizer is taken")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    speeds: dict[tuple[int, str], list[float]] = defaultdict(list)
    with open_engine(args.model, args.tokenizer) as engine:
        print(f"mlxrt {mlxrt.__version__}, {args.model}, {engine.vocab_size} tokens, {args.rows} rows")
        for run in range(-1, args.runs):  # the first compiles grammars and kernels
            for held in sorted({0, 1, args.rows}):
                for kind, speed in measure(engine, args.rows, held, args.tokens, run + 1).items():
                    if run >= 0:
                        speeds[held, kind].append(speed)
    for (held, kind), found in sorted(speeds.items()):
        plain = speeds[0, "CPU" if kind == "CPU" else "free"]
        ratio = statistics.median(a / b for a, b in zip(found, plain))
        what = "all rows, a second of CPU time" if kind == "CPU" else f"a {kind} row"
        print(f"{held} of {args.rows} held: {statistics.median(found):8.2f} tok/s {what}, {ratio:.3f}x of all free")


if __name__ == "__main__":
    main()
