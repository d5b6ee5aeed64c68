"""Quality on real text: perplexity, and how often the likeliest token stays the same, for fewer bits.

Keys and values in fewer bits run as they would; weights are rounded to fewer bits and back, which gives the numbers of
packed weights at the speed of plain ones. Windows of text, only their second half judged: every target has context.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

from ...errors import BadRequest
from ..contest import Contest, Options
from ..result import OURS, Figure
from . import Case

WINDOW, WINDOWS = 512, 4
KINDS: dict[str, dict[str, Any]] = {
    OURS: {},
    "kv q8": {"kv": "q8"},
    "kv q4": {"kv": "q4"},
    "kv k8v4": {"kv": "k8v4"},
    "weights 8 bit": {"weight_bits": 8},
    "weights 6 bit": {"weight_bits": 6},
    "weights 4 bit": {"weight_bits": 4},
}


def cases(options: Options) -> list[Case]:
    return [Case("quality", "text", partial(run, windows=WINDOWS), weight=4.0)]


def run(contest: Contest, windows: int) -> Iterator[Figure]:
    if not contest.language:
        raise BadRequest("quality needs a model with a tokenizer and a text: drawn tokens have no perplexity")
    size = min(WINDOW, contest.context)
    texts = [contest.prompts(size, 100 + i) for i in range(windows)]
    found: dict[str, dict[str, Any]] = {}
    for i, (kind, config) in enumerate(KINDS.items()):
        if contest.stop():
            break
        found[kind] = contest.ours.ask(do="losses", windows=texts, first=size // 2 + 1, config=config)
        contest.tell(f"quality, {kind}", i + 1, (i + 1) / len(KINDS))
    targets = len(found[OURS]["losses"])
    ppl = {kind: [math.exp(math.fsum(f["losses"]) / targets)] for kind, f in found.items()}
    same = {kind: [share(f["best"], found[OURS]["best"])] for kind, f in found.items() if kind != OURS}
    case = f"{targets} targets"
    yield contest.figure("quality", case, "perplexity", "", ppl, higher=False)
    yield contest.figure("quality", case, "same likeliest token", "share", same)


def share(a: list[int], b: list[int]) -> float:
    return sum(x == y for x, y in zip(a, b, strict=True)) / len(a)
