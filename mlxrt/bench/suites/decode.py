"""Decode: time between tokens, after prompts of several lengths.

The prompt is computed once and kept by every engine; a round decodes a few tokens from there. The first token of a
round is not timed: it belongs to the prompt.
"""

from collections.abc import Iterator
from functools import partial

from ..contest import WALL, Contest, Options
from ..result import OURS, Figure
from ..statistics import SURE, paired_ratio
from ..turns import Reply, Rounds
from . import Case


def cases(options: Options) -> list[Case]:
    return [Case("decode", f"after {n}", partial(run, n=n)) for n in options.lengths]


def rate(contest: Contest, reply: Reply) -> float:
    last = len(reply["at"]) - 1
    return last / contest.spent(reply, 0, last)


def waits(contest: Contest, rounds: Rounds) -> tuple[str, ...]:
    """Processor time does not see an engine that sleeps: where the wall clock surely tells another story, say so."""
    if contest.clock == WALL:
        return ()
    wall = rounds.values(lambda reply: 1 / (reply[WALL][-1] - reply[WALL][0]))
    judged = rounds.values(partial(rate, contest))
    found = []
    for name in wall.keys() - {OURS}:
        n = min(len(wall[name]), len(wall[OURS]))
        seen = paired_ratio(wall[OURS][:n], wall[name][:n], 0.99, rounds.processes)
        told = paired_ratio(judged[OURS][:n], judged[name][:n], 0.99, rounds.processes)
        if seen.level > SURE and (told.high < seen.low or told.low > seen.high):
            found.append(f"by the wall clock the ratio to {name} is {seen}: one of them waits for something")
    return tuple(found)


def gaps(replies: list[Reply]) -> list[float]:
    """Milliseconds between tokens, of all rounds."""
    return [1e3 * (b - a) for reply in replies for a, b in zip(reply["at"], reply["at"][1:])]


def run(contest: Contest, n: int) -> Iterator[Figure]:
    n = min(n, contest.context - contest.options.decoded - 1)
    prompt = contest.prompts(n, 0)
    asked = {"do": "generate", "prompt": prompt, "max_tokens": contest.options.decoded + 1, "fresh": False}
    short = asked | {"max_tokens": 3} if contest.on_cpu else asked  # warming up is for the prompt
    speed = partial(rate, contest)
    rounds = contest.alternate(f"decode after {n}", lambda name, r: [asked if r >= 0 else short], [speed])
    work, middle = contest.subject.work, n + contest.options.decoded / 2
    needed = work.bytes_at(int(middle))
    yield contest.figure(
        "decode",
        f"after {n}",
        "decode",
        "tok/s",
        rounds.values(speed),
        roof=contest.roof["copy_bytes_per_s"] / needed,
        at={"context": n, "flops": work.flops_at(middle), "intensity": work.flops_at(middle) / needed},
        latencies={name: gaps(replies) for name, replies in rounds.replies.items()},
        agreement=rounds.agreement.to_dict(),
        notes=waits(contest, rounds),
    )
    peaks = {name: [r["peak"] / 1e6 for r in replies if "peak" in r] for name, replies in rounds.replies.items()}
    peaks = {name: values for name, values in peaks.items() if values}
    if OURS in peaks:
        yield contest.figure("decode", f"after {n}", "peak memory", "MB", peaks, higher=False, at={"context": n})
