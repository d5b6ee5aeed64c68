"""Quality on real text: perplexity, and how often the likeliest token stays the same, with fewer bits.

KV cache kinds run as they would; weights are quantized and dequantized, which gives the values of packed weights at
the speed of plain ones. Windows of text, of which only the second half counts: every target has context.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

from ...errors import BadRequest
from ..comparison import Comparison, Options
from ..result import OURS, Figure
from . import Case

WINDOW, WINDOWS = 512, 4
WEIGHT_BITS = (8, 6, 4)


def cases(options: Options) -> list[Case]:
    return [Case("quality", "text", partial(run, windows=WINDOWS), weight=4.0)]


def run(comparison: Comparison, windows: int) -> Iterator[Figure]:
    if not comparison.real_text:
        raise BadRequest("quality needs a model with a tokenizer and a text: random tokens have no perplexity")
    kinds: dict[str, dict[str, Any]] = {OURS: {}}
    kinds |= {f"kv {kind}": {"kv": kind} for kind in comparison.options.kv}
    kinds |= {f"weights {bits} bit": {"weight_bits": bits} for bits in WEIGHT_BITS}
    size = min(WINDOW, comparison.context)
    sections = [comparison.prompts(size, 100 + i) for i in range(windows)]
    found: dict[str, dict[str, Any]] = {}
    for i, (kind, config) in enumerate(kinds.items()):
        if comparison.stop():
            break
        found[kind] = comparison.ours.ask(do="losses", windows=sections, first=size // 2 + 1, config=config)
        comparison.on_round(f"quality, {kind}", i + 1, (i + 1) / len(kinds))
    targets = len(found[OURS]["losses"])
    perplexity = {kind: [math.exp(math.fsum(f["losses"]) / targets)] for kind, f in found.items()}
    same = {kind: [equal_share(f["best"], found[OURS]["best"])] for kind, f in found.items() if kind != OURS}
    case = f"{targets} targets"
    yield comparison.figure("quality", case, "perplexity", "", perplexity, higher=False)
    yield comparison.figure("quality", case, "same likeliest token", "share", same)


def equal_share(a: list[int], b: list[int]) -> float:
    return sum(x == y for x, y in zip(a, b, strict=True)) / len(a)
