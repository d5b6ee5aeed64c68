"""A report for people: one line a figure, ratios with their intervals, the share of the roof, and what went wrong."""

from collections.abc import Iterator

from .result import OURS, Figure, Report
from .statistics import Ratio


def lines(report: Report) -> Iterator[str]:
    yield from heading(report)
    peers = [name for name, told in report.sides.items() if name != OURS and "absent" not in told]
    names = [OURS, *peers]
    for suite in dict.fromkeys(f.suite for f in report.figures):
        found = [f for f in report.figures if f.suite == suite]
        yield ""
        yield (f"{suite:<34}" + "".join(f"{short(name):>12}" for name in names) + "   ratios (> 1: mlxrt better)")
        for f in found:
            yield row(f, names)
    yield ""
    yield from verdicts(report)


def heading(report: Report) -> Iterator[str]:
    model, m, roof = report.model, report.machine, report.roof
    ours = report.sides.get(OURS, {})
    if model:
        yield f"{model['name']}  {model['digest'][:12]}  computed in {ours.get('dtype', '?')}"
    if m:
        yield f"{m['system']}, {ours.get('device_name') or m['processor']}, MLX {m['libraries'].get('mlx')}"
    if roof:
        rates = ", ".join(
            f"{k.split('_')[1]} {v / 1e9:,.0f} GFLOP/s" for k, v in roof.items() if k.startswith("matmul")
        )
        yield f"roof: copy {roof['copy_bytes_per_s'] / 1e9:,.1f} GB/s, matmul {rates}"
    if report.settings.get("clock") == "processor":
        yield "clock: processor time of one thread, since the machine is busy; waits for first tokens are by the wall"
    for name, told in report.sides.items():
        if "absent" in told:
            yield f"{name} is absent: {told['absent']}"
        elif name != OURS:
            yield f"against {told['engine']}"


def row(f: Figure, names: list[str]) -> str:
    cells = "".join(f"{amount(f.sides[n].median) if n in f.sides else '-':>12}" for n in names)
    share = f.share(OURS)
    roof = f"  {share:.1%} of roof" if share is not None else ""
    ratios = "  ".join(f"{short(peer)} {told(r)}" for peer, r in f.ratios.items())
    return f"  {f'{f.case}, {f.what}, {f.unit}':<32}{cells}   {ratios}{roof}"


def told(r: Ratio) -> str:
    mark = {"faster": "+", "slower": "-", "same": "=", "unsure": "?"}[r.verdict]
    sure = "" if r.level >= 0.94 else f" ({r.level:.0%})"
    return f"{mark}{r}{sure}"


def verdicts(report: Report) -> Iterator[str]:
    judged = [f for f in report.figures if f.agreement]
    compared = sum(sum(f.agreement["compared"].values()) for f in judged if f.agreement)
    equal = sum(sum(f.agreement["equal"].values()) for f in judged if f.agreement)
    if compared:
        yield f"tokens: {equal} of {compared} answers of peers are ours"
    for f in judged:
        assert f.agreement is not None
        for d in f.agreement["differences"]:
            kind = "WRONG" if d["wrong"] else "a tie"
            gap = "unknown" if d["gap"] is None else f"{d['gap']:.2e}"
            yield (
                f"  {f.suite} / {f.case}: {d['side']} differs at token {d['place']}, "
                f"{d['ours']} against {d['theirs']}, {gap} apart in our logits ({kind})"
            )
        yield from (f"  {f.suite} / {f.case}: {remark}" for remark in f.agreement["remarks"])
    yield from (f"  {f.suite} / {f.case}: {note}" for f in report.figures for note in f.notes)
    yield from (f"problem: {line}" for line in report.problems)
    if not report.complete:
        yield "NOT COMPLETE: the run was interrupted"
    yield f"{len(report.figures)} figures in {report.seconds:.0f} s"


def amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" if value >= 0.001 or value == 0 else f"{value:.1e}"


def short(name: str) -> str:
    return name.removeprefix("http://").removeprefix("https://")[:11]
