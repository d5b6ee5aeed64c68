"""Perplexity of the default model on Moby-Dick through `engine.score`, against llama.cpp's figure for the same targets.

Windows of 512 tokens, no BOS; only each window's second half is judged, so that every target has context.
Exit 0: within the limit. 1: beyond. 2: a piece is missing.
"""

import argparse
import math
import sys
from typing import Any

# isort: off
import mlxrt  # before MLX: it brings the BLAS
import mlx.core as mx
# isort: on

from mlxrt.bench import novel

LLAMA_CPP = 46.34  # build 0.3.36 on the same GGUF, windows and targets (shared/facts/real-models.md)
LIMIT_PERCENT = 0.2
WINDOW, WINDOWS = 512, 4
FIRST_TARGET = WINDOW // 2 + 1
CHARACTERS = 20_000  # more than WINDOWS * WINDOW tokens of English


def window_losses(engine: mlxrt.Engine, tokens: list[int], chunk: int | None) -> list[float]:
    """Minus the log probability of every judged target of one window."""
    logits = engine.score(tokens, chunk)[FIRST_TARGET - 1 : -1]
    chosen = mx.take_along_axis(logits, mx.array(tokens[FIRST_TARGET:])[:, None], axis=-1)[:, 0]
    losses: Any = (mx.logsumexp(logits, axis=-1) - chosen).tolist()
    return losses


def measure(engine: mlxrt.Engine, chunk: int | None) -> tuple[float, int]:
    """Perplexity and the number of targets."""
    tokens = engine.tokenizer.encode(novel.read_text()[:CHARACTERS], special=False)
    assert len(tokens) >= WINDOW * WINDOWS
    every: list[float] = []
    for start in range(0, WINDOW * WINDOWS, WINDOW):
        every += window_losses(engine, tokens[start : start + WINDOW], chunk)
    return math.exp(math.fsum(every) / len(every)), len(every)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chunk", type=int, help="tokens in one step (default: the engine's)")
    options = parser.parse_args()
    try:
        with mlxrt.load("smollm2") as engine:
            ppl, targets = measure(engine, options.chunk)
    except mlxrt.MlxrtError as error:
        print(error, file=sys.stderr)
        return 2
    off = 100 * (ppl / LLAMA_CPP - 1)
    within = abs(off) <= LIMIT_PERCENT
    print(f"perplexity {ppl:.3f} over {targets} targets; llama.cpp {LLAMA_CPP}: {off:+.3f} % (limit {LIMIT_PERCENT} %)")
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
