"""A report's plots, drawn by matplotlib as SVG. A plot without data is left out."""

import io
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from ..errors import BadRequest
from .result import OURS, Figure, Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours: distinguishable for everybody, on white and on black.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31")


def require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise BadRequest("plots need matplotlib: pip install 'mlxrt[bench]'") from None


def new_plot(title: str, x: str, y: str, size: tuple[float, float] = (6.2, 3.4)) -> "Axes":
    from matplotlib.figure import Figure as Canvas  # not pyplot: no display and no global state

    axes = Canvas(figsize=size, layout="constrained").subplots()
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def to_svg(axes: "Axes") -> str:
    import matplotlib

    out, canvas = io.StringIO(), cast(Any, axes.figure)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "mlxrt"}):
        canvas.savefig(out, format="svg", metadata={"Date": None}, transparent=True)
    svg = out.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.S)
    return re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg).replace("xlink:href", "href")  # as HTML wants it


def plots(report: Report) -> Iterator["Axes"]:
    """Every plot there is data for."""
    names = [OURS, *(n for n in report.backends if n != OURS)]
    names += sorted({n for f in report.figures for n in f.engines} - set(names))
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    for what, title in (("decode", "Decode by context"), ("prefill", "Prefill by prompt length")):
        if figures := [f for f in report.figures if f.suite == what and f.what == what]:
            yield plot_by_length(figures, title, colours)
    if memory := [f for f in report.figures if f.suite == "decode" and f.what == "peak memory"]:
        yield plot_by_length(memory, "Peak memory by context", colours)
    if compared := [f for f in report.figures if any(not p.startswith(f"{OURS} ") for p in f.ratios)]:
        yield plot_ratios(compared, colours)
    for suite, title in (("decode", "Time between tokens, wall time"), ("batch", "First token in a batch, wall time")):
        if timed := [f for f in report.figures if f.suite == suite and f.percentiles]:
            yield plot_percentiles(timed[-1], f"{title}, {timed[-1].case}", colours)
    if placed := [f for f in report.figures if "intensity" in f.at]:
        yield plot_roofline(report, placed, colours)


def plot_by_length(figures: list[Figure], title: str, colours: dict[str, str]) -> "Axes":
    axes = new_plot(title, "tokens", figures[0].unit)
    for name in dict.fromkeys(name for f in figures for name in f.engines):
        points = sorted((f.at["context"], f.engines[name]) for f in figures if name in f.engines)
        middle = [s.median for _, s in points]
        errors = [[s.median - s.low for _, s in points], [s.high - s.median for _, s in points]]
        lengths = [n for n, _ in points]
        axes.errorbar(lengths, middle, errors, color=colours[name], label=name, marker="o", capsize=3)
    highest = max(s.high for f in figures for s in f.engines.values())
    roofline = [(f.at["context"], f.roofline) for f in figures if f.roofline and f.roofline < 4 * highest]
    if len(roofline) == len(figures):
        axes.plot(*zip(*roofline), "--", color="gray", label="roofline")
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.legend()
    return axes


def plot_ratios(figures: list[Figure], colours: dict[str, str]) -> "Axes":
    """Every comparison with its interval; other configurations of mlxrt are no peers."""
    rows = [(f, peer, r) for f in figures for peer, r in f.ratios.items() if not peer.startswith(f"{OURS} ")]
    title = "mlxrt against its peers (right of 1: mlxrt is better)"
    axes = new_plot(title, "ratio", "", (9.6, 1.2 + 0.28 * len(rows)))
    labelled: set[str] = set()
    for i, (_, peer, r) in enumerate(rows):
        label = None if peer in labelled else peer
        labelled.add(peer)
        error: Any = [[r.value - r.low], [r.high - r.value]]
        axes.errorbar([r.value], [i], xerr=error, color=colours[peer], marker="o", capsize=3, ls="", label=label)
    axes.axvline(1, color="gray")
    axes.set_xscale("log")
    axes.set_yticks(range(len(rows)), [f"{f.suite}: {f.case}, {f.what}" for f, _, _ in rows])
    axes.invert_yaxis()
    axes.legend()
    return axes


def plot_percentiles(f: Figure, title: str, colours: dict[str, str]) -> "Axes":
    axes = new_plot(title, "", "ms")
    steps, width = list(next(iter(f.percentiles.values()))), 0.8 / len(f.percentiles)
    for j, (name, values) in enumerate(f.percentiles.items()):
        left = [i + j * width for i in range(len(steps))]
        axes.bar(left, [values[s] for s in steps], width, color=colours[name], label=name)
    axes.set_xticks([i + 0.4 - width / 2 for i in range(len(steps))], steps)
    axes.legend()
    return axes


def plot_roofline(report: Report, figures: list[Figure], colours: dict[str, str]) -> "Axes":
    copy = report.device_peak["copy_bytes_per_s"]
    flops = report.device_peak[f"matmul_{report.backends[OURS]['dtype']}_flops"]
    title = f"Roofline: {copy / 1e9:,.1f} GB/s copied, {flops / 1e9:,.0f} GFLOP/s multiplied"
    axes = new_plot(title, "FLOPs per byte", "FLOP/s", (9.6, 3.6))
    labelled: set[str] = set()
    for f in figures:
        for name, s in f.engines.items():
            label = None if name in labelled else name
            labelled.add(name)
            axes.plot(f.at["intensity"], s.median * f.at["flops"], "o", color=colours[name], label=label)
        lowest = min(s.median for s in f.engines.values()) * f.at["flops"]
        axes.annotate(f"{f.suite} {f.case}", (f.at["intensity"], lowest), fontsize=7)
    low, high = (
        min(f.at["intensity"] for f in figures) / 2,
        2 * max(flops / copy, *(f.at["intensity"] for f in figures)),
    )
    axes.plot([low, flops / copy, high], [low * copy, flops, flops], "--", color="gray")
    axes.set(xscale="log", yscale="log")
    axes.legend()
    return axes
