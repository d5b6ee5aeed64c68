"""Reports against one another: two runs figure by figure, and every figure over time.

Two runs are not paired, so the machine may have changed too. A peer measured in both tells: what mlxrt gained on the
peer is the change that no machine explains.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import BadRequest
from .result import OURS, Figure, Report
from .statistics import Ratio, unpaired_ratio


@dataclass(frozen=True)
class Change:
    """A figure after over before; above 1 where after is better."""

    figure: Figure  # after
    before: Figure
    engine: str
    ratio: Ratio
    peers: dict[str, Ratio]  # the same ratio of every peer in both runs
    against: dict[str, Ratio]  # mlxrt's ratio to the peer, after over before

    @property
    def conclusion(self) -> str:
        """What is certain, relative to the peers where there are any."""
        found = [r.conclusion for r in (*self.against.values(), self.ratio)]
        if "unsure" in found:
            return "unsure"
        return found[0] if len(set(found)) == 1 else "same"


def compare_reports(before: Report, after: Report, level: float) -> list[Change]:
    old = {(f.name, f.unit): f for f in before.figures}
    found = []
    for f in after.figures:
        match = old.get((f.name, f.unit))
        if match is None:
            continue
        for engine in f.engines:
            if engine.startswith(OURS) and engine in match.engines:
                found.append(compare_figures(match, f, engine, level))
    return found


def compare_figures(before: Figure, after: Figure, engine: str, level: float) -> Change:
    def shift(name: str) -> Ratio:
        a, b = before.engines[name].values, after.engines[name].values
        return unpaired_ratio(b, a, level) if after.higher else unpaired_ratio(a, b, level)

    shared = [peer for peer in after.ratios if peer in before.ratios] if engine == OURS else []
    against = {peer: unpaired_ratio(round_ratios(after, peer), round_ratios(before, peer), level) for peer in shared}
    return Change(after, before, engine, shift(engine), {p: shift(p) for p in shared}, against)


def round_ratios(f: Figure, peer: str) -> list[float]:
    """mlxrt over the peer, round by round."""
    pairs = zip(f.engines[OURS].values, f.engines[peer].values)
    return [a / b if f.higher else b / a for a, b in pairs]


def format_changes(before: Report, after: Report, changes: list[Change]) -> Iterator[str]:
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
        a, b = c.before.engines[c.engine].median, c.figure.engines[c.engine].median
        peers = "".join(f"  against {p} {r}" for p, r in c.against.items())
        name = c.figure.name if c.engine == OURS else f"{c.figure.name}, {c.engine}"
        yield f"  {c.conclusion:<7} {name:<52} {a:>10.4g} -> {b:<10.4g} {c.figure.unit:<8} {c.ratio}{peers}"
    yield "above 1: better after. same: the interval contains 1, or a peer changed alike (the machine explains it)"


def machine_name(report: Report) -> str:
    """Short, and the same for the same machine: processor or device, cores."""
    ours = report.backends.get(OURS, {})
    device = ours.get("device_name") or report.machine.get("processor") or "machine"
    return slug(f"{report.machine.get('name', 'machine')}-{device}")


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def save_to_history(report: Report, folder: Path) -> Path:
    """Save as MACHINE/DATE-MODEL.json."""
    day = slug(report.created.replace("+00:00", "z"))
    path = folder / machine_name(report) / f"{day}-{slug(Path(str(report.model['name'])).name)}.json"
    report.save(path)
    return path


def format_history(folder: Path) -> Iterator[str]:
    """mlxrt's median of every figure, run by run, oldest first."""
    if not folder.is_dir():
        raise BadRequest(f"{folder} is not a folder; `mlxrt bench ... --save FOLDER` makes one")
    files = sorted(folder.glob("*/*.json"))
    if not files:
        raise BadRequest(f"{folder} holds no reports")
    series: dict[tuple[str, str], dict[str, list[str]]] = {}
    for report in (Report.load(path) for path in files):
        key = (machine_name(report), str(report.model.get("name")))
        for f in report.figures:
            if OURS in f.engines:
                ratios = "".join(f" {peer} {r.value:.2f}" for peer, r in f.ratios.items())
                line = f"{report.created[:16]} {f.engines[OURS].median:.4g} {f.unit}{ratios}"
                series.setdefault(key, {}).setdefault(f.name, []).append(line)
    for (machine, model), figures in series.items():
        yield f"{machine}, {model}"
        for name, runs in figures.items():
            yield f"  {name}: " + "; ".join(runs)
