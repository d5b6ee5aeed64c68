"""Decode: time between tokens after prompts of several lengths.

Every engine prefills the prompt once and keeps it; a round decodes a few tokens from there. The first token of a round
is not timed: it belongs to the prompt.
"""

from collections.abc import Iterator
from functools import partial

from ..comparison import WALL, Comparison, Options
from ..interleave import Reply, Rounds
from ..result import OURS, Figure
from ..statistics import MIN_LEVEL, paired_ratio
from . import Case


def cases(options: Options) -> list[Case]:
    return [Case("decode", f"after {n}", partial(run, n=n)) for n in options.lengths]


def rate(comparison: Comparison, reply: Reply) -> float:
    last = len(reply["at"]) - 1
    return last / comparison.seconds(reply, 0, last)


def sleep_notes(comparison: Comparison, rounds: Rounds) -> tuple[str, ...]:
    """CPU time does not see an engine that sleeps: note where wall time gives a significantly different ratio."""
    if comparison.clock == WALL:
        return ()
    wall = rounds.values(lambda reply: 1 / (reply[WALL][-1] - reply[WALL][0]))
    cpu = rounds.values(partial(rate, comparison))
    notes = []
    for name in wall.keys() - {OURS}:
        n = min(len(wall[name]), len(wall[OURS]))
        by_wall = paired_ratio(wall[OURS][:n], wall[name][:n], 0.99, rounds.processes)
        by_cpu = paired_ratio(cpu[OURS][:n], cpu[name][:n], 0.99, rounds.processes)
        if by_wall.level > MIN_LEVEL and (by_cpu.high < by_wall.low or by_cpu.low > by_wall.high):
            notes.append(f"by the wall clock the ratio to {name} is {by_wall}: one of them waits for something")
    return tuple(notes)


def token_gaps(replies: list[Reply]) -> list[float]:
    """Milliseconds between tokens of all rounds."""
    return [1e3 * (b - a) for reply in replies for a, b in zip(reply["at"], reply["at"][1:])]


def run(comparison: Comparison, n: int) -> Iterator[Figure]:
    n = min(n, comparison.context - comparison.options.decoded - 1)
    prompt = comparison.prompts(n, 0)
    question = {"do": "generate", "prompt": prompt, "max_tokens": comparison.options.decoded + 1, "fresh": False}
    warmup = question | {"max_tokens": 3} if comparison.on_cpu else question  # it prefills the prompt
    speed = partial(rate, comparison)
    rounds = comparison.run(f"decode after {n}", lambda name, r: [question if r >= 0 else warmup], [speed])
    cost, middle = comparison.model.cost, n + comparison.options.decoded / 2
    read = cost.bytes_at(int(middle))
    yield comparison.figure(
        "decode",
        f"after {n}",
        "decode",
        "tok/s",
        rounds.values(speed),
        roofline=comparison.device_peak["copy_bytes_per_s"] / read,
        at={"context": n, "flops": cost.flops_at(middle), "intensity": cost.flops_at(middle) / read},
        latencies={name: token_gaps(replies) for name, replies in rounds.replies.items()},
        agreement=rounds.agreement.to_dict(),
        notes=sleep_notes(comparison, rounds),
    )
    memory = {name: [r["peak"] / 1e6 for r in replies if "peak" in r] for name, replies in rounds.replies.items()}
    memory = {name: values for name, values in memory.items() if values}
    if OURS in memory:
        yield comparison.figure("decode", f"after {n}", "peak memory", "MB", memory, higher=False, at={"context": n})
