"""Two reports, figure by figure: what changed, and whether it is more than noise.

The runs are not paired, so the machine may have changed too. A peer that ran in both tells: what mlxrt gained on it is
the change that no machine explains.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from .result import OURS, Figure, Report
from .statistics import Ratio, unpaired_ratio


@dataclass(frozen=True)
class Change:
    """After over before, above 1 where after is better. `peers`: the same for every peer in both runs."""

    figure: Figure  # after
    before: Figure
    side: str
    ratio: Ratio
    peers: dict[str, Ratio]
    against: dict[str, Ratio]  # mlxrt's ratio to the peer, after over before

    @property
    def verdict(self) -> str:
        """What is sure: judged against the peers where there are any."""
        judged = [r.verdict for r in (*self.against.values(), self.ratio)]
        if "unsure" in judged or len(set(judged)) > 1:
            return "same" if "unsure" not in judged else "unsure"
        return judged[0]


def compare_reports(before: Report, after: Report, level: float) -> list[Change]:
    old = {(f.name, f.unit): f for f in before.figures}
    found = []
    for f in after.figures:
        match = old.get((f.name, f.unit))
        if match is None:
            continue
        for side in f.sides:
            if side.startswith(OURS) and side in match.sides:
                found.append(change(match, f, side, level))
    return found


def change(before: Figure, after: Figure, side: str, level: float) -> Change:
    def shift(name: str) -> Ratio:
        a, b = before.sides[name].values, after.sides[name].values
        return unpaired_ratio(b, a, level) if after.higher else unpaired_ratio(a, b, level)

    shared = [peer for peer in after.ratios if peer in before.ratios] if side == OURS else []
    against = {peer: unpaired_ratio(gains(after, peer), gains(before, peer), level) for peer in shared}
    return Change(after, before, side, shift(side), {p: shift(p) for p in shared}, against)


def gains(f: Figure, peer: str) -> list[float]:
    """mlxrt over the peer, round by round."""
    pairs = zip(f.sides[OURS].values, f.sides[peer].values)
    return [a / b if f.higher else b / a for a, b in pairs]


def lines(before: Report, after: Report, changes: list[Change]) -> Iterator[str]:
    yield f"before: {before.created}  {before.model.get('name')}"
    yield f"after:  {after.created}  {after.model.get('name')}"
    for what, a, b in (
        ("model", before.model.get("digest"), after.model.get("digest")),
        ("machine", before.machine.get("name"), after.machine.get("name")),
        ("libraries", before.machine.get("libraries"), after.machine.get("libraries")),
        ("threads", before.settings.get("threads"), after.settings.get("threads")),
    ):
        if a != b:
            yield f"NOT THE SAME {what}: {a} / {b}"
    if not changes:
        yield "the two reports have no figure in common"
    for c in changes:
        a, b = c.before.sides[c.side].median, c.figure.sides[c.side].median
        peers = "".join(f"  against {p} {r}" for p, r in c.against.items())
        name = c.figure.name if c.side == OURS else f"{c.figure.name}, {c.side}"
        yield f"  {c.verdict:<7} {name:<52} {a:>10.4g} -> {b:<10.4g} {c.figure.unit:<8} {c.ratio}{peers}"
    yield "above 1: better after. same: the intervals hold 1, or the machine explains it (a peer changed alike)"
