"""Interleaved rounds: every engine in turn, until the comparison is precise enough. Knows no engine and no question.

The order is A, B, C, then C, B, A: drift hits all alike, and each round of mlxrt has a round of every peer beside it.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .result import OURS
from .statistics import Ratio, StoppingRule, paired_ratio
from .tokens import Agreement

Reply = dict[str, Any]
Run = Callable[[int], Reply | None]  # round (below 0: warm-up) -> reply; None: the engine has dropped out
Measure = Callable[[Reply], float]


@dataclass
class Rounds:
    """The replies of one case, by engine and round."""

    replies: dict[str, list[Reply]] = field(default_factory=dict)
    processes: int = 1  # how often the engines were started
    agreement: Agreement = field(default_factory=Agreement)

    def add(self, replies: dict[str, Reply]) -> None:
        for name, reply in replies.items():
            self.replies.setdefault(name, []).append(reply)

    def values(self, measure: Measure) -> dict[str, list[float]]:
        return {name: [measure(reply) for reply in replies] for name, replies in self.replies.items()}

    def ratios(self, measures: list[Measure], level: float) -> list[Ratio]:
        found = []
        for measure in measures:
            values = self.values(measure)
            ours = values.pop(OURS, [])
            pairs = [theirs for theirs in values.values() if len(theirs) == len(ours)]
            found += [paired_ratio(ours, theirs, level, self.processes) for theirs in pairs]
        return found


Check = Callable[[Rounds, int, dict[str, Reply]], None]  # sees the replies of every round


def accept_all(rounds: Rounds, r: int, replies: dict[str, Reply]) -> None:
    """Check nothing: for replies that may differ."""


def run_round(engines: Mapping[str, Run], r: int) -> dict[str, Reply]:
    order = list(engines) if r % 2 == 0 else list(reversed(list(engines)))
    return {name: reply for name in order if (reply := engines[name](r)) is not None}


@dataclass(frozen=True)
class Interleave:
    """Runs rounds until the stopping rule is met or the user stops."""

    rule: StoppingRule
    stop: Callable[[], bool] = lambda: False
    restart: Callable[[], None] | None = None  # starts every engine anew
    restart_every: int = 0  # rounds
    on_round: Callable[[int, float], None] = lambda rounds, share: None  # rounds done, share of the time spent

    def run(
        self, engines: Mapping[str, Run], measures: list[Measure], *, warmup: int = 1, check: Check = accept_all
    ) -> Rounds:
        """`warmup` rounds that do not count, then as many as the rule needs."""
        rounds, rule, began = Rounds(), self.rule, time.perf_counter()
        for r in range(-warmup, rule.max_rounds):
            if self.stop():
                break
            if self.restart is not None and r > 0 and r % self.restart_every == 0:
                self.restart()
                rounds.processes += 1
                run_round(engines, -1)
            replies = run_round(engines, r)
            if r < 0:
                continue
            rounds.add({name: replies[name] for name in engines if name in replies})
            check(rounds, r, replies)
            spent = time.perf_counter() - began
            self.on_round(r + 1, spent / max(rule.seconds, 1.0))
            if rule.is_satisfied(rounds.ratios(measures, rule.level), r + 1, spent):
                break
        if not rounds.replies:
            raise KeyboardInterrupt
        return rounds
