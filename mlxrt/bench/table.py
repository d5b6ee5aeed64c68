"""A report as text: one line a figure with ratios, intervals and the share of the roofline, then what went wrong."""

from collections import Counter
from collections.abc import Iterator

from .result import OURS, Figure, Report
from .statistics import Ratio


def format_report(report: Report) -> Iterator[str]:
    yield from format_heading(report)
    for suite in dict.fromkeys(f.suite for f in report.figures):
        found = [f for f in report.figures if f.suite == suite]
        yield ""
        yield from engine_rows(suite, found) if has_many_engines(found) else figure_rows(suite, found)
    yield ""
    yield from format_summary(report)


def engine_names(figures: list[Figure]) -> list[str]:
    return list(dict.fromkeys(name for f in figures for name in f.engines))


def has_many_engines(figures: list[Figure]) -> bool:
    """With many kinds of an engine and few figures, a row a kind reads better than a column a kind."""
    return len(engine_names(figures)) > 4


def figure_rows(suite: str, figures: list[Figure]) -> Iterator[str]:
    names = engine_names(figures)
    columns = "".join(f"{short(name):>14}" for name in names)
    ratios = "   ratios (> 1: mlxrt is better)" if any(f.ratios for f in figures) else ""
    yield f"{suite:<46}{columns}{ratios}"
    yield from (format_row(f, names) for f in figures)


def engine_rows(suite: str, figures: list[Figure]) -> Iterator[str]:
    yield f"{suite:<18}" + "".join(f"{f'{f.what}, {f.unit}'.rstrip(', '):>34}" for f in figures)
    for name in engine_names(figures):
        cells = []
        for f in figures:
            value = format_value(f.engines[name].median) if name in f.engines else "-"
            cells.append(f"{value} {relative_to_ours(f, name)}" if name in f.ratios else value)
        yield f"  {name:<16}" + "".join(f"{cell:>34}" for cell in cells)


def relative_to_ours(f: Figure, name: str) -> str:
    """An engine's value relative to mlxrt's own."""
    r = f.ratios[name]
    value, low, high = (1 / r.value, 1 / r.high, 1 / r.low) if f.higher else (r.value, r.low, r.high)
    return f"({value:.3f} [{low:.3f}, {high:.3f}])"


def format_heading(report: Report) -> Iterator[str]:
    model, machine, peak = report.model, report.machine, report.device_peak
    ours = report.backends.get(OURS, {})
    if model:
        yield f"{model['name']}  {model['digest'][:12]}  computed in {ours.get('dtype', '?')}"
    if machine:
        device = ours.get("device_name") or machine["processor"]
        yield f"{machine['system']}, {device}, MLX {machine['libraries'].get('mlx')}"
    if peak:
        rates = ", ".join(
            f"{k.split('_')[1]} {v / 1e9:,.0f} GFLOP/s" for k, v in peak.items() if k.startswith("matmul")
        )
        yield f"device peak: copy {peak['copy_bytes_per_s'] / 1e9:,.1f} GB/s, matmul {rates}"
    if report.settings.get("clock") == "processor":
        yield "clock: CPU time of one thread, since the machine is busy; waits for first tokens are wall time"
    for name, info in report.backends.items():
        if "absent" in info:
            yield f"{name} is absent: {info['absent']}"
        elif name != OURS:
            yield f"against {info['engine']}"


def format_row(f: Figure, names: list[str]) -> str:
    cells = "".join(f"{format_value(f.engines[n].median) if n in f.engines else '-':>14}" for n in names)
    share = f.roofline_share(OURS)
    roofline = f"  {share:.1%} of roofline" if share is not None else ""
    ratios = "  ".join(f"{short(peer)} {format_ratio(r)}" for peer, r in f.ratios.items())
    unit = f", {f.unit}" if f.unit else ""
    return f"  {f'{f.case}, {f.what}{unit}':<44}{cells}   {ratios}{roofline}".rstrip()


def format_ratio(r: Ratio) -> str:
    level = "" if r.level >= 0.94 else f" ({r.level:.0%})"
    return f"{r}{level} {r.conclusion}"


def format_headline(report: Report) -> Iterator[str]:
    """One sentence for each peer: in how many figures mlxrt is faster."""
    for peer in (name for name in report.backends if name != OURS):
        found = Counter(f.ratios[peer].conclusion for f in report.figures if peer in f.ratios)
        counts = [f"{kind} in {found[kind]}" for kind in ("faster", "slower", "same", "unsure") if found[kind]]
        if counts:
            yield f"mlxrt beside {short(peer)}, {found.total()} figures: {', '.join(counts)}"


def format_summary(report: Report) -> Iterator[str]:
    """What came out, token agreement, notes and problems."""
    yield from format_headline(report)
    checked = [(f, f.agreement) for f in report.figures if f.agreement]
    compared = sum(sum(agreement["compared"].values()) for _, agreement in checked)
    equal = sum(sum(agreement["equal"].values()) for _, agreement in checked)
    if compared:
        yield f"tokens: {equal} of {compared} answers of peers equal ours"
    for f, agreement in checked:
        for d in agreement["differences"]:
            kind = "WRONG" if d["wrong"] else "a tie"
            gap = "unknown" if d["gap"] is None else f"{d['gap']:.2e}"
            yield (
                f"  {f.suite} / {f.case}: {d['side']} differs at token {d['place']}, "
                f"{d['ours']} against {d['theirs']}, gap {gap} in our logits ({kind})"
            )
        yield from (f"  {f.suite} / {f.case}: {remark}" for remark in agreement["remarks"])
    yield from (f"  {f.suite} / {f.case}: {note}" for f in report.figures for note in f.notes)
    yield from (f"problem: {line}" for line in report.problems)
    if not report.complete:
        yield "NOT COMPLETE: the run was interrupted, or its time was up"
    yield f"{len(report.figures)} figures in {report.seconds:.0f} s"


def format_value(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" if value >= 0.001 or value == 0 else f"{value:.1e}"


def short(name: str) -> str:
    return name.removeprefix("http://").removeprefix("https://")[:13]
