"""Serving: long prompts and then a short one arrive while a stream is running; and a batch of very unequal lengths.

What a chunked prefill owes to the others: the running stream must not stall for longer than the scheduler's bound, and
the short request must not wait for all the long ones. What a paged KV cache owes: bytes and positions of a batch are
those of its tokens, not of its longest row.
"""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

from ..comparison import Comparison, Options
from ..interleave import Reply
from ..result import OURS, Figure
from . import Case

LONG_PROMPTS, SHORT_ROWS = 8, 7
AFTER = 4  # tokens of the stream before the others arrive
SHORT, ANSWER = 20, 8  # tokens


def cases(options: Options) -> list[Case]:
    return [Case("serving", "flood", flood, weight=3.0), Case("serving", "unequal lengths", unequal_lengths)]


def request(prompt: list[int], max_tokens: int, late: bool = False) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": max_tokens, "late": late}


def run(comparison: Comparison, label: str, requests: list[dict[str, Any]], measure: Any) -> dict[str, list[Reply]]:
    engines = {name: name for name in comparison.backends if name in (OURS, "mlx-lm")}
    question = {"do": "serve", "requests": requests, "after": AFTER}
    rounds = comparison.run(label, lambda engine, r: [question], [measure], engines=engines, check=False)
    return rounds.replies


def flood(comparison: Comparison) -> Iterator[Figure]:
    options = comparison.options
    n = min(max(options.lengths), comparison.context - ANSWER - 1)
    stream = min(24 + LONG_PROMPTS * n // 128, comparison.context - 41)  # outlasts the flood
    requests = [request(comparison.prompts(40, 60), stream)]
    requests += [request(comparison.prompts(n, 61 + i), ANSWER, late=True) for i in range(LONG_PROMPTS)]
    requests.append(request(comparison.prompts(SHORT, 80), ANSWER, late=True))
    tokens = sum(len(r["prompt"]) + r["max_tokens"] for r in requests)
    measures = {
        ("short request's first token", "s", False): lambda reply: reply["rows"][-1]["at"][0],
        ("prompt and output tokens", "tok/s", True): lambda reply: tokens / reply["seconds"],
        ("longest gap in the stream", "s", False): lambda reply: longest_gap(reply["rows"][0]["at"]),
        ("prompt tokens between two of the stream", "tokens", False): lambda reply: max(1.0, reply["stall"]),
    }
    replies = run(comparison, "serving, flood", requests, lambda reply: tokens / reply["seconds"])
    for reply in replies[OURS]:
        if reply["stall"] > reply["stall_bound"]:
            stall = f"{reply['stall']} prompt tokens between two of a stream, bound {reply['stall_bound']}"
            comparison.problems.append(f"serving / flood: {stall}")
    case = f"{LONG_PROMPTS} prompts of {n} beside a stream"
    for (what, unit, higher), measure in measures.items():
        values = {name: [measure(reply) for reply in found] for name, found in replies.items()}
        yield comparison.figure("serving", case, what, unit, values, higher=higher)


def longest_gap(times: list[float]) -> float:
    return max((b - a for a, b in pairwise(times)), default=0.0)


def unequal_lengths(comparison: Comparison) -> Iterator[Figure]:
    """One long prompt and seven short ones: KV bytes and computed positions relative to their tokens."""
    n = min(max(comparison.options.lengths), comparison.context - ANSWER - 1)
    lengths = [n] + [min(32, n)] * SHORT_ROWS
    requests = [request(comparison.prompts(size, 90 + i), ANSWER) for i, size in enumerate(lengths)]
    tokens = sum(len(r["prompt"]) + r["max_tokens"] - 1 for r in requests)  # the last token is not computed
    positions = partial(relative, key="positions", tokens=tokens)
    replies = run(comparison, "serving, unequal lengths", requests, positions)
    case = f"one prompt of {n}, {SHORT_ROWS} of {lengths[-1]}"
    values = {name: [positions(reply) for reply in found] for name, found in replies.items()}
    yield comparison.figure("serving", case, "positions computed a token", "", values, higher=False)
    held = {name: [reply["held"] / reply["held_tokens"] for reply in found] for name, found in replies.items()}
    yield comparison.figure("serving", case, "KV bytes a token", "bytes", held, higher=False)


def relative(reply: Reply, key: str, tokens: int) -> float:
    return reply[key] / tokens
