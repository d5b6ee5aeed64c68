"""Many requests. Batch: prompts of mixed lengths, all at once, then arriving one after the other. Serving: long prompts
and then a short one arrive while a stream is running; and a batch of very unequal lengths.

What a chunked prefill owes to the others: the running stream must not stall for longer than the scheduler's bound, and
the short request must not wait for all the long ones. What a paged KV cache owes: bytes and positions of a batch are
those of its tokens, not of its longest row.
"""

import random
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from statistics import fmean
from typing import Any

from ..comparison import WALL, Comparison, Options
from ..interleave import Measure, Reply, Rounds
from ..result import OURS, Figure
from . import Case

LONG_PROMPTS, SHORT_ROWS = 8, 7
AFTER = 4  # tokens of the stream before the others arrive
SHORT, ANSWER = 20, 8  # tokens


def cases(options: Options) -> list[Case]:
    return [
        Case("batch", "at once", partial(batch, spaced=False, name="at once"), weight=2.0),
        Case("batch", "arriving", partial(batch, spaced=True, name="arriving"), weight=2.0),
        Case("serving", "flood", flood, weight=3.0),
        Case("serving", "unequal lengths", unequal_lengths),
    ]


def batch_rate(comparison: Comparison, reply: Reply) -> float:
    """Tokens a second of all requests together."""
    seconds = reply["seconds" if comparison.clock == WALL else "seconds_used"]
    return sum(len(row["at"]) for row in reply["rows"]) / seconds


def first_token_times(reply: Reply) -> list[float]:
    """Seconds from each request's arrival to its first token."""
    return [row["at"][0] for row in reply["rows"]]


def mixed_requests(comparison: Comparison, spacing: float) -> list[dict[str, Any]]:
    """The same lengths and arrival times for every engine and round."""
    generator = random.Random(1)
    lengths = comparison.options.lengths
    longest = min(lengths[len(lengths) // 2], comparison.context - comparison.options.decoded - 1)
    after, requests = 0.0, []
    for i in range(comparison.options.requests):
        size = max(4, round(longest ** generator.uniform(0.5, 1.0)))
        prompt = comparison.prompts(size, i + 7)
        requests.append({"prompt": prompt, "max_tokens": comparison.options.decoded, "after": after})
        after += spacing * generator.expovariate(1.0)
    return requests


def batch(comparison: Comparison, spaced: bool, name: str) -> Iterator[Figure]:
    spacing = 0.0
    if spaced:  # at the rate mlxrt can serve, so that the queue neither empties nor grows without end
        at_once = comparison.ours.ask(do="batch", requests=mixed_requests(comparison, 0.0))
        spacing = at_once["seconds"] / comparison.options.requests
    requests = mixed_requests(comparison, spacing)
    speed, question = partial(batch_rate, comparison), {"do": "batch", "requests": requests}
    warmup = question | {"requests": requests[:1]} if comparison.on_cpu else question
    rounds = comparison.run(f"batch, {name}", lambda engine, r: [question if r >= 0 else warmup], [speed])
    case = f"{name}, {len(requests)} requests"
    ms = {
        engine: [1e3 * seconds for reply in replies for seconds in first_token_times(reply)]
        for engine, replies in rounds.replies.items()
    }
    waits = rounds.values(lambda reply: fmean(first_token_times(reply)))
    yield comparison.figure(
        "batch", case, "all tokens", "tok/s", rounds.values(speed), agreement=rounds.agreement.to_dict()
    )
    yield comparison.figure("batch", case, "first token, mean", "s", waits, higher=False, latencies=ms)


def request(prompt: list[int], max_tokens: int, late: bool = False) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": max_tokens, "late": late}


def serve(comparison: Comparison, label: str, requests: list[dict[str, Any]], measure: Measure) -> Rounds:
    engines = {name: name for name in comparison.backends if name in (OURS, "mlx-lm")}
    question = {"do": "serve", "requests": requests, "after": AFTER}
    return comparison.run(label, lambda engine, r: [question], [measure], engines=engines, check=False)


def flood(comparison: Comparison) -> Iterator[Figure]:
    options = comparison.options
    n = min(max(options.lengths), comparison.context - ANSWER - 1)
    stream = min(24 + LONG_PROMPTS * n // 128, comparison.context - 41)  # outlasts the flood
    requests = [request(comparison.prompts(40, 60), stream)]
    requests += [request(comparison.prompts(n, 61 + i), ANSWER, late=True) for i in range(LONG_PROMPTS)]
    requests.append(request(comparison.prompts(SHORT, 80), ANSWER, late=True))
    tokens = sum(len(r["prompt"]) + r["max_tokens"] for r in requests)
    measures: dict[tuple[str, str, bool], Measure] = {
        ("short request's first token", "s", False): lambda reply: reply["rows"][-1]["at"][0],
        ("prompt and output tokens", "tok/s", True): lambda reply: tokens / reply["seconds"],
        ("longest gap in the stream", "s", False): lambda reply: max(
            (b - a for a, b in pairwise(reply["rows"][0]["at"])), default=0.0
        ),
        ("prompt tokens between two of the stream", "tokens", False): lambda reply: max(1.0, reply["stall"]),
    }
    rounds = serve(comparison, "serving, flood", requests, lambda reply: tokens / reply["seconds"])
    for reply in rounds.replies[OURS]:
        if reply["stall"] > reply["stall_bound"]:
            stall = f"{reply['stall']} prompt tokens between two of a stream, bound {reply['stall_bound']}"
            comparison.problems.append(f"serving / flood: {stall}")
    case = f"{LONG_PROMPTS} prompts of {n} beside a stream"
    for (what, unit, higher), measure in measures.items():
        yield comparison.figure("serving", case, what, unit, rounds.values(measure), higher=higher)


def unequal_lengths(comparison: Comparison) -> Iterator[Figure]:
    """One long prompt and seven short ones: KV bytes and computed positions relative to their tokens."""
    n = min(max(comparison.options.lengths), comparison.context - ANSWER - 1)
    lengths = [n] + [min(32, n)] * SHORT_ROWS
    requests = [request(comparison.prompts(size, 90 + i), ANSWER) for i, size in enumerate(lengths)]
    tokens = sum(len(r["prompt"]) + r["max_tokens"] - 1 for r in requests)  # the last token is not computed

    def positions(reply: Reply) -> float:
        return reply["positions"] / tokens

    rounds = serve(comparison, "serving, unequal lengths", requests, positions)
    case = f"one prompt of {n}, {SHORT_ROWS} of {lengths[-1]}"
    yield comparison.figure("serving", case, "positions computed a token", "", rounds.values(positions), higher=False)
    held = rounds.values(lambda reply: reply["held"] / reply["held_tokens"])
    yield comparison.figure("serving", case, "KV bytes a token", "bytes", held, higher=False)
