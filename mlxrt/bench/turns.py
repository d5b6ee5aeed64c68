"""Players in turns, round after round, until the comparison is sure enough. Knows no engine and no question.

A, B, C, then C, B, A: what drifts hits all alike, and mlxrt has a round of every peer beside each of its own.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .result import OURS
from .statistics import Patience, Ratio, paired_ratio
from .tokens import Agreement

Reply = dict[str, Any]
Player = Callable[[int], Reply | None]  # round (below 0: warming up) -> answer; None: it has dropped out
Measure = Callable[[Reply], float]


@dataclass
class Rounds:
    """The answers of one case, by player and round."""

    replies: dict[str, list[Reply]] = field(default_factory=dict)
    processes: int = 1  # how often the players were started
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


Judge = Callable[[Rounds, int, dict[str, Reply]], None]  # sees every round's answers


def no_judge(rounds: Rounds, r: int, replies: dict[str, Reply]) -> None:
    """For answers that may differ, or that are none."""


def ask(players: Mapping[str, Player], r: int) -> dict[str, Reply]:
    """One round."""
    order = list(players) if r % 2 == 0 else list(reversed(list(players)))
    return {name: reply for name in order if (reply := players[name](r)) is not None}


@dataclass(frozen=True)
class Turns:
    """How a round of turns is run: when it ends, and who is told."""

    patience: Patience
    stop: Callable[[], bool] = lambda: False
    renew: Callable[[], None] | None = None  # starts every player anew
    block: int = 0  # rounds after which that is done
    tell: Callable[[int, float], None] = lambda rounds, share: None  # rounds done, part of the time that is spent

    def play(
        self,
        players: Mapping[str, Player],
        measures: list[Measure],
        *,
        warm: int = 1,
        judge: Judge = no_judge,
    ) -> Rounds:
        """`warm` rounds that do not count, then as many as are needed."""
        rounds, patience, began = Rounds(), self.patience, time.perf_counter()
        for r in range(-warm, patience.most):
            if self.stop():
                break
            if self.renew is not None and r > 0 and r % self.block == 0:
                self.renew()
                rounds.processes += 1
                ask(players, -1)
            got = ask(players, r)
            if r < 0:
                continue
            rounds.add({name: got[name] for name in players if name in got})
            judge(rounds, r, got)
            spent = time.perf_counter() - began
            self.tell(r + 1, spent / max(patience.seconds, 1.0))
            if patience.enough(rounds.ratios(measures, patience.level), r + 1, spent):
                break
        if not rounds.replies:
            raise KeyboardInterrupt
        return rounds
