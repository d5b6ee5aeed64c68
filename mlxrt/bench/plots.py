"""Which plots a report has, and what goes into them. A plot without data is not drawn."""

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from .result import OURS, Figure, Report
from .svg import BOTTOM, COLOURS, LEFT, RIGHT, Axis, Plot, brief, frame, legend


@dataclass(frozen=True)
class Drawing:
    title: str
    svg: str
    remark: str = ""


def colours(report: Report) -> dict[str, str]:
    """An engine has the same colour in every plot."""
    names = [OURS, *(n for n in report.sides if n != OURS)]
    names += sorted({n for f in report.figures for n in f.sides} - set(names))
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}


def drawings(report: Report) -> Iterator[Drawing]:
    chosen = colours(report)
    for what, title in (("decode", "Decode against context"), ("prefill", "Prefill against prompt length")):
        figures = [f for f in report.figures if f.suite == what and f.what == what]
        if figures:
            yield against_length(figures, title, chosen)
    if memory := [f for f in report.figures if f.suite == "decode" and f.what == "peak memory"]:
        yield against_length(memory, "Peak memory against context", chosen)
    if judged := [f for f in report.figures if f.ratios]:
        yield ratios(judged, chosen)
    for suite, title in (("decode", "Time between tokens"), ("batch", "Wait for the first token in a batch")):
        if waits := [f for f in report.figures if f.suite == suite and f.percentiles]:
            yield latencies(waits[-1], f"{title}, {waits[-1].case}", chosen)
    if placed := [f for f in report.figures if "intensity" in f.at]:
        yield roofline(report, placed, chosen)


def against_length(figures: list[Figure], title: str, chosen: dict[str, str]) -> Drawing:
    names = list(dict.fromkeys(name for f in figures for name in f.sides))
    tops = [s.high for f in figures for s in f.sides.values()]
    lengths = [f.at["context"] for f in figures]
    roofs = [f.roof for f in figures if f.roof is not None and f.roof < 4 * max(tops)]
    x = Axis.around(lengths, log=True) if len(set(lengths)) > 1 else Axis(lengths[0] / 2, lengths[0] * 2, True)
    unit = figures[0].unit
    plot = Plot(x, Axis.around([*tops, *roofs], zero=True), "tokens", unit, x_ticks=sorted(set(lengths)))
    for name in names:
        found = sorted((f.at["context"], f.sides[name]) for f in figures if name in f.sides)
        plot.line([(n, s.median) for n, s in found], chosen[name])
        for n, s in found:
            told = f"{name}, {n:g} tokens: {s.median:.4g} {unit} (quartiles {s.low:.4g} to {s.high:.4g})"
            plot.point(n, s.median, chosen[name], told, s.low, s.high)
    remark = ""
    if roofs and len(roofs) == len(figures):
        plot.line([(f.at["context"], f.roof) for f in figures if f.roof], "currentColor", dashed=True)
        remark = "Dashed: the roof, what the device's measured rate allows."
    return Drawing(title, legend(names, chosen) + plot.text(), remark)


def ratios(figures: list[Figure], chosen: dict[str, str]) -> Drawing:
    """Every comparison as a line from the low to the high end of its interval."""
    kinds = f"{OURS} "  # other kinds of mlxrt are no peers
    rows = [
        (f"{f.case}, {f.what}", f.suite, peer, r)
        for f in figures
        for peer, r in f.ratios.items()
        if not peer.startswith(kinds)
    ]
    width, height, left, step = 940, 40 + 20 * len(rows), 360, 20
    axis = Axis.around([0.8, 1.25, *(v for *_, r in rows for v in (r.low, r.high))], log=True)
    place = lambda value: left + axis.part(value) * (width - left - 20)  # noqa: E731
    parts = []
    for tick in axis.ticks():
        kind = "axis" if tick == 1 else "grid"
        parts.append(f'<path class="{kind}" d="M{place(tick):.1f} 8V{height - 26}"/>')
        parts.append(f'<text x="{place(tick):.1f}" y="{height - 10}" text-anchor="middle">{brief(tick)}</text>')
    for i, (name, suite, peer, r) in enumerate(rows):
        y, colour = 18 + i * step, chosen[peer]
        told = escape(f"{suite}: {name}, against {peer}: {r}, {r.level:.0%}, {r.rounds} rounds")
        parts.append(f'<text x="{left - 10}" y="{y + 4}" text-anchor="end">{escape(f"{suite}: {name}")}</text>')
        parts.append(f'<path d="M{place(r.low):.1f} {y}H{place(r.high):.1f}" stroke="{colour}" stroke-width="3"/>')
        parts.append(
            f'<circle cx="{place(r.value):.1f}" cy="{y}" r="4.5" fill="{colour}"><title>{told}</title></circle>'
        )
    peers = list(dict.fromkeys(peer for _, _, peer, _ in rows))
    remark = "Right of 1: mlxrt is better. The line is the interval; one that crosses 1 says nothing."
    return Drawing("mlxrt against its peers", legend(peers, chosen) + frame(width, height, parts), remark)


def latencies(f: Figure, title: str, chosen: dict[str, str]) -> Drawing:
    names, steps = list(f.percentiles), list(next(iter(f.percentiles.values())))
    plot = Plot(
        Axis(0, 1),
        Axis.around([v for p in f.percentiles.values() for v in p.values()], zero=True),
        "",
        "ms",
        x_ticks=(),
    )
    room = (plot.width - LEFT - RIGHT) / len(steps)
    wide = 0.8 * room / len(names)
    for i, step in enumerate(steps):
        for j, name in enumerate(names):
            value = f.percentiles[name][step]
            left = LEFT + room * (i + 0.1) + j * wide
            plot.bar(left, wide - 2, value, chosen[name], f"{name} {step}: {value:.4g} ms")
        middle = LEFT + room * (i + 0.5)
        plot.parts.append(f'<text x="{middle:.1f}" y="{plot.height - BOTTOM + 16}" text-anchor="middle">{step}</text>')
    return Drawing(title, legend(names, chosen) + plot.text())


def roofline(report: Report, figures: list[Figure], chosen: dict[str, str]) -> Drawing:
    """What a figure does a second over what it does with a byte; above both lines nothing is possible."""
    copy = report.roof["copy_bytes_per_s"]
    dtype = report.sides[OURS]["dtype"]
    most = report.roof[f"matmul_{dtype}_flops"]
    points = [(f.at["intensity"], s.median * f.at["flops"], name, f) for f in figures for name, s in f.sides.items()]
    xs = [p[0] for p in points] + [most / copy]
    x, y = (
        Axis.around([*xs, 1.6 * max(xs)], log=True),
        Axis.around([p[1] for p in points] + [most, min(xs) * copy], log=True),
    )
    plot = Plot(x, y, "operations per byte", "operations per second", width=940, height=320)
    knee = most / copy
    plot.line([(x.low, x.low * copy), (knee, most), (x.high, most)], "currentColor", dashed=True)
    for intensity, rate, name, f in points:
        told = f"{name}: {f.suite} {f.case}, {brief(rate)} a second at {intensity:.3g} a byte"
        plot.point(intensity, rate, chosen[name], told)
    named = {round(f.at["intensity"], 1): f for f in figures}  # decode reads all for one token, whatever its context
    for intensity, f in named.items():
        slowest = min(s.median for s in f.sides.values()) * f.at["flops"]
        alone = f.suite == "prefill"
        plot.label(f.at["intensity"], slowest, f"{f.suite} {f.case}" if alone or intensity > 1 else f.suite)
    names = list(dict.fromkeys(p[2] for p in points))
    remark = f"Dashed: {copy / 1e9:,.1f} GB/s copied and {most / 1e9:,.0f} GFLOP/s multiplied, measured before the run."
    return Drawing("Roofline", legend(names, chosen) + plot.text(), remark)
