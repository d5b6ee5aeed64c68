"""Prefill: from the call to the first token of a prompt that no cache holds."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from ..comparison import Comparison, Options
from ..interleave import Reply
from ..result import Figure
from . import Case


def cases(options: Options) -> list[Case]:
    longest = max(options.lengths)
    return [Case("prefill", f"{n} tokens", partial(run, n=n), weight=1 + n / longest) for n in options.lengths]


def run(comparison: Comparison, n: int) -> Iterator[Figure]:
    n = min(n, comparison.context - 2)

    def questions(name: str, r: int) -> list[dict[str, Any]]:
        size = min(n, 16) if r < 0 and comparison.on_cpu else n
        return [{"do": "generate", "prompt": comparison.prompts(size, r + 2), "max_tokens": 1, "fresh": True}]

    def rate(reply: Reply) -> float:
        return n / comparison.seconds(reply, -1, 0)

    rounds = comparison.run(f"prefill {n}", questions, [rate])
    cost, dtype = comparison.model.cost, comparison.ours.info["dtype"]
    flops = cost.flops_at(n / 2)
    yield comparison.figure(
        "prefill",
        f"{n} tokens",
        "prefill",
        "tok/s",
        rounds.values(rate),
        roofline=comparison.device_peak[f"matmul_{dtype}_flops"] / flops,
        at={"context": n, "flops": flops, "intensity": n * flops / cost.bytes_read},
        latencies={name: [1e3 * r["at"][0] for r in replies] for name, replies in rounds.replies.items()},
        agreement=rounds.agreement.to_dict(),
    )
