"""Prefill: from the call to the first token, of a prompt nobody has seen."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from ..contest import Contest, Options
from ..result import Figure
from ..turns import Reply
from . import Case


def cases(options: Options) -> list[Case]:
    longest = max(options.lengths)
    return [Case("prefill", f"{n} tokens", partial(run, n=n), weight=1 + n / longest) for n in options.lengths]


def run(contest: Contest, n: int) -> Iterator[Figure]:
    n = min(n, contest.context - 2)

    def questions(name: str, r: int) -> list[dict[str, Any]]:
        size = min(n, 16) if r < 0 and contest.on_cpu else n
        return [{"do": "generate", "prompt": contest.prompts(size, r + 2), "max_tokens": 1, "fresh": True}]

    def rate(reply: Reply) -> float:
        return n / contest.spent(reply, -1, 0)

    rounds = contest.alternate(f"prefill {n}", questions, [rate])
    flops = contest.subject.work.flops_at(n / 2)
    dtype = contest.ours.told["dtype"]
    yield contest.figure(
        "prefill",
        f"{n} tokens",
        "prefill",
        "tok/s",
        rounds.values(rate),
        roof=contest.roof[f"matmul_{dtype}_flops"] / flops,
        at={"context": n, "flops": flops, "intensity": n * flops / contest.subject.work.read},
        latencies={name: [1e3 * r["at"][0] for r in replies] for name, replies in rounds.replies.items()},
        agreement=rounds.agreement.to_dict(),
    )
