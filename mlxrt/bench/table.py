"""A report for people: one line a figure, ratios with their intervals, the share of the roof, and what went wrong."""

from collections.abc import Iterator

from .result import OURS, Figure, Report
from .statistics import Ratio


def lines(report: Report) -> Iterator[str]:
    yield from heading(report)
    for suite in dict.fromkeys(f.suite for f in report.figures):
        found = [f for f in report.figures if f.suite == suite]
        yield ""
        yield from tall(suite, found) if is_tall(found) else wide(suite, found)
    yield ""
    yield from verdicts(report)


def is_tall(figures: list[Figure]) -> bool:
    """Many kinds, few figures: a row a kind reads better than a column a kind."""
    return len({name for f in figures for name in f.sides}) > 4


def wide(suite: str, figures: list[Figure]) -> Iterator[str]:
    names = list(dict.fromkeys(name for f in figures for name in f.sides))
    columns = "".join(f"{short(name):>14}" for name in names)
    ratios = "   ratios (> 1: mlxrt is better)" if any(f.ratios for f in figures) else ""
    yield f"{suite:<46}{columns}{ratios}"
    yield from (row(f, names) for f in figures)


def tall(suite: str, figures: list[Figure]) -> Iterator[str]:
    yield f"{suite:<18}" + "".join(f"{f'{f.what}, {f.unit}'.rstrip(', '):>34}" for f in figures)
    for name in dict.fromkeys(name for f in figures for name in f.sides):
        cells = []
        for f in figures:
            value = amount(f.sides[name].median) if name in f.sides else "-"
            cells.append(f"{value} {against(f, name)}" if name in f.ratios else value)
        yield f"  {name:<16}" + "".join(f"{cell:>34}" for cell in cells)


def against(f: Figure, name: str) -> str:
    """Of a kind: its part of what mlxrt's own figure is."""
    r = f.ratios[name]
    value, low, high = (1 / r.value, 1 / r.high, 1 / r.low) if f.higher else (r.value, r.low, r.high)
    return f"({value:.3f} [{low:.3f}, {high:.3f}])"


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
    cells = "".join(f"{amount(f.sides[n].median) if n in f.sides else '-':>14}" for n in names)
    share = f.share(OURS)
    roof = f"  {share:.1%} of roof" if share is not None else ""
    ratios = "  ".join(f"{short(peer)} {told(r)}" for peer, r in f.ratios.items())
    unit = f", {f.unit}" if f.unit else ""
    return f"  {f'{f.case}, {f.what}{unit}':<44}{cells}   {ratios}{roof}".rstrip()


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
        yield "NOT COMPLETE: the run was interrupted, or its time was up"
    yield f"{len(report.figures)} figures in {report.seconds:.0f} s"


def amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" if value >= 0.001 or value == 0 else f"{value:.1e}"


def short(name: str) -> str:
    return name.removeprefix("http://").removeprefix("https://")[:13]
