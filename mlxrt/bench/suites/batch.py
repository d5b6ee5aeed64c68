"""Many requests in one engine: prompts of mixed lengths, all at once, then one after the other."""

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

from ..contest import WALL, Contest, Options
from ..result import Figure
from ..turns import Reply
from . import Case


def cases(options: Options) -> list[Case]:
    ways = ("at once", "arriving")
    return [Case("batch", name, partial(run, spaced=name == "arriving", name=name), weight=2.0) for name in ways]


def rate(contest: Contest, reply: Reply) -> float:
    """Tokens a second, all requests together."""
    seconds = reply["seconds" if contest.clock == WALL else "seconds_used"]
    return sum(len(row["at"]) for row in reply["rows"]) / seconds


def waits(reply: Reply) -> list[float]:
    """Seconds to each request's first token, from its arrival."""
    return [row["at"][0] for row in reply["rows"]]


def mean_wait(reply: Reply) -> float:
    found = waits(reply)
    return sum(found) / len(found)


def mixture(contest: Contest, spacing: float) -> list[dict[str, Any]]:
    """The same for every engine and round: lengths and arrivals are drawn once."""
    chance = random.Random(1)
    lengths = contest.options.lengths
    longest = min(lengths[len(lengths) // 2], contest.context - contest.options.decoded - 1)
    after, found = 0.0, []
    for i in range(contest.options.requests):
        size = max(4, round(longest ** chance.uniform(0.5, 1.0)))
        asked = {"prompt": contest.prompts(size, i + 7), "max_tokens": contest.options.decoded, "after": after}
        found.append(asked)
        after += spacing * chance.expovariate(1.0)
    return found


def run(contest: Contest, spaced: bool, name: str) -> Iterator[Figure]:
    spacing = 0.0
    if spaced:  # as fast as mlxrt could answer them all: a queue that neither empties nor grows without end
        once = contest.ours.ask(do="batch", requests=mixture(contest, 0.0))
        spacing = once["seconds"] / contest.options.requests
    requests = mixture(contest, spacing)
    speed, asked = partial(rate, contest), {"do": "batch", "requests": requests}
    first = asked | {"requests": requests[:1]} if contest.on_cpu else asked
    rounds = contest.alternate(f"batch, {name}", lambda side, r: [asked if r >= 0 else first], [speed])
    case = f"{name}, {len(requests)} requests"
    ms = {side: [1e3 * w for reply in replies for w in waits(reply)] for side, replies in rounds.replies.items()}
    told = rounds.agreement.to_dict()
    yield contest.figure("batch", case, "all tokens", "tok/s", rounds.values(speed), agreement=told)
    yield contest.figure("batch", case, "first token, mean", "s", rounds.values(mean_wait), higher=False, latencies=ms)
