"""Decode: time between tokens, after prompts of several lengths.

The prompt is computed once and kept by every engine; a round decodes a few tokens from there. The first token of a
round is not timed: it belongs to the prompt.
"""

from collections.abc import Iterator
from functools import partial

from ..contest import Contest, Options
from ..result import OURS, Figure
from ..turns import Reply
from . import Case


def cases(options: Options) -> list[Case]:
    return [Case("decode", f"after {n}", partial(run, n=n)) for n in options.lengths]


def rate(contest: Contest, reply: Reply) -> float:
    last = len(reply["at"]) - 1
    return last / contest.spent(reply, 0, last)


def gaps(replies: list[Reply]) -> list[float]:
    """Milliseconds between tokens, of all rounds."""
    return [1e3 * (b - a) for reply in replies for a, b in zip(reply["at"], reply["at"][1:])]


def run(contest: Contest, n: int) -> Iterator[Figure]:
    n = min(n, contest.context - contest.options.decoded - 1)
    prompt = contest.prompts(n, 0)
    asked = {"do": "generate", "prompt": prompt, "max_tokens": contest.options.decoded + 1, "fresh": False}
    short = asked | {"max_tokens": 3}  # warming up is for the prompt
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
    )
    peaks = {name: [r["peak"] / 1e6 for r in replies if "peak" in r] for name, replies in rounds.replies.items()}
    peaks = {name: values for name, values in peaks.items() if values}
    if OURS in peaks:
        yield contest.figure("decode", f"after {n}", "peak memory", "MB", peaks, higher=False, at={"context": n})
