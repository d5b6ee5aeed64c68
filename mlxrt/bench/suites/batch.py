"""Batching: requests with prompts of mixed lengths, all at once, then arriving one after the other."""

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

from ..comparison import WALL, Comparison, Options
from ..interleave import Reply
from ..result import Figure
from . import Case


def cases(options: Options) -> list[Case]:
    names = ("at once", "arriving")
    return [Case("batch", name, partial(run, spaced=name == "arriving", name=name), weight=2.0) for name in names]


def rate(comparison: Comparison, reply: Reply) -> float:
    """Tokens a second of all requests together."""
    seconds = reply["seconds" if comparison.clock == WALL else "seconds_used"]
    return sum(len(row["at"]) for row in reply["rows"]) / seconds


def first_token_times(reply: Reply) -> list[float]:
    """Seconds from each request's arrival to its first token."""
    return [row["at"][0] for row in reply["rows"]]


def mean_first_token(reply: Reply) -> float:
    times = first_token_times(reply)
    return sum(times) / len(times)


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


def run(comparison: Comparison, spaced: bool, name: str) -> Iterator[Figure]:
    spacing = 0.0
    if spaced:  # at the rate mlxrt can serve, so that the queue neither empties nor grows without end
        at_once = comparison.ours.ask(do="batch", requests=mixed_requests(comparison, 0.0))
        spacing = at_once["seconds"] / comparison.options.requests
    requests = mixed_requests(comparison, spacing)
    speed, question = partial(rate, comparison), {"do": "batch", "requests": requests}
    warmup = question | {"requests": requests[:1]} if comparison.on_cpu else question
    rounds = comparison.run(f"batch, {name}", lambda engine, r: [question if r >= 0 else warmup], [speed])
    case = f"{name}, {len(requests)} requests"
    ms = {
        engine: [1e3 * seconds for reply in replies for seconds in first_token_times(reply)]
        for engine, replies in rounds.replies.items()
    }
    waits = rounds.values(mean_first_token)
    yield comparison.figure(
        "batch", case, "all tokens", "tok/s", rounds.values(speed), agreement=rounds.agreement.to_dict()
    )
    yield comparison.figure("batch", case, "first token, mean", "s", waits, higher=False, latencies=ms)
