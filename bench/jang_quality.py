"""What formats cost the default model: bits per weight, perplexity on Moby-Dick's windows, KL to the source.

usage: python -m bench.jang_quality [--only NAME ...] [--windows N]
Bundles are made by our own writers into a temporary folder. Exit 1 when a limit (LIMITS) is broken.
"""

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

# isort: off
import mlxrt  # before MLX: it brings the BLAS
import mlx.core as mx
# isort: on

from mlxrt.bench import novel
from mlxrt.cli.convert import SAMPLE
from mlxrt.engine.load import open_checkpoint
from mlxrt.weights.convert.calibration import importance
from mlxrt.weights.convert.convert import convert
from mlxrt.weights.convert.recipe import Recipe
from mlxrt.weights.source.resolve import locate

from .perplexity import CHARACTERS, FIRST_TARGET, WINDOW, WINDOWS

MODEL = "smollm2"
# The widths of JANG_4M, through plain MLX affine: what the profile is compared with.
SAME_WIDTHS = ((r"\.[qkvo]_proj\.|lm_head", {"bits": 8}), (r".", {"bits": 4}))
FORMS = {
    "affine 4": Recipe("mlx", bits=4),
    "affine 2": Recipe("mlx", bits=2),
    "affine, widths of JANG_4M": Recipe("mlx", rules=SAME_WIDTHS),
    "affine 2 in the MLPs, 8 elsewhere": Recipe("mlx", rules=((r"\.mlp\.", {"bits": 2}), (r".", {"bits": 8}))),
    "JANG_4M": Recipe("jang", profile="JANG_4M"),
    "JANGTQ4": Recipe("jangtq", profile="JANGTQ4"),
    "JANGTQ2": Recipe("jangtq", profile="JANGTQ2"),
    "codebook, 1024 of 8": Recipe("codebook", codes=1024),
    "codebook": Recipe("codebook", codes=256, length=4),  # 2 bits a weight, as its neighbours
}
# name -> (what it is compared with, the largest ratio of perplexities)
LIMITS = {
    "JANG_4M": ("affine, widths of JANG_4M", 1.03),
    "JANGTQ4": ("affine 4", 1.12),
    "codebook": ("affine 2 in the MLPs, 8 elsewhere", 1.0),
}


def judged(engine: mlxrt.Engine, tokens: list[int]) -> mx.array:
    """Log probabilities [targets, vocab] of one window's second half."""
    logits = engine.score(tokens)[FIRST_TARGET - 1 : -1]
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def measure(
    name: str, windows: list[list[int]], source: list[mx.array] | None
) -> tuple[dict[str, float], list[mx.array]]:
    """(perplexity and mean KL to the source, the log probabilities themselves)."""
    losses, kls, kept = [], [], []
    with mlxrt.load(name) as engine:
        for i, tokens in enumerate(windows):
            found = judged(engine, tokens)
            chosen: Any = mx.take_along_axis(found, mx.array(tokens[FIRST_TARGET:])[:, None], axis=-1)[:, 0].tolist()
            losses += [-value for value in chosen]
            if source is not None:
                kls += (mx.exp(source[i]) * (source[i] - found)).sum(axis=-1).tolist()
            else:
                mx.eval(found)
                kept.append(found)
    told = {"perplexity": math.exp(math.fsum(losses) / len(losses))}
    return told | ({"kl": math.fsum(kls) / len(kls)} if kls else {}), kept


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=FORMS, help="these formats (default: all)")
    parser.add_argument("--windows", type=int, default=WINDOWS)
    options = parser.parse_args()
    with mlxrt.load(MODEL, mlxrt.EngineConfig(kernels="reference")) as engine:
        tokens = engine.tokenizer.encode(novel.read_text()[:CHARACTERS], special=False)
        counts = importance(engine, engine.tokenizer.encode(SAMPLE))
    windows = [tokens[i * WINDOW : (i + 1) * WINDOW] for i in range(options.windows)]
    base, source = measure(MODEL, windows, None)
    print(json.dumps({"format": "source", **base}), flush=True)
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as place:
        for number, name in enumerate(options.only or FORMS):
            folder = Path(place) / str(number)
            done = convert(open_checkpoint(locate(MODEL)), folder, FORMS[name], weigh=lambda: counts)
            told, _ = measure(str(folder), windows, source)
            found[name] = told["perplexity"]
            print(json.dumps({"format": name, "bits_per_weight": round(done.bits_per_weight, 3), **told}), flush=True)
    return judge(found)


def judge(found: dict[str, float]) -> int:
    broken = 0
    for name, (other, limit) in LIMITS.items():
        if name in found and other in found:
            ratio = found[name] / found[other]
            broken += ratio > limit
            print(f"{name} / {other}: {ratio:.4f} (at most {limit}) {'ok' if ratio <= limit else 'BROKEN'}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
