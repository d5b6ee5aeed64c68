"""A report as one HTML file: tables and plots, no script, nothing from the network."""

from collections.abc import Iterator, Mapping
from html import escape

from .plots import plots, to_svg
from .result import OURS, Figure, Report
from .table import (
    engine_names,
    format_heading,
    format_headline,
    format_ratio,
    format_summary,
    format_value,
    has_many_engines,
    relative_to_ours,
)

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 2rem auto; padding: 0 1rem; color: #1b1f24 }
h1 { font-size: 1.6rem } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem } p { color: #57606a; margin: .2rem 0 }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .88rem }
th, td { padding: .3rem .5rem; text-align: right; border-bottom: 1px solid #e1e4e8; overflow-wrap: anywhere }
th:first-child, td:first-child { text-align: left; min-width: 10rem } th { color: #57606a }
.wide { overflow-x: auto }
.faster { color: #0a7d4f } .slower { color: #c4450c } .same, .unsure { color: #57606a }
svg { max-width: 100%; height: auto; display: block; margin: 1rem 0 }
.alarm { border-left: 4px solid #c4450c; padding: .3rem .8rem }
"""


def render_html(report: Report) -> str:
    name = escape(str(report.model.get("name", "no model")))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>mlxrt bench: {name}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>'
        f"<body>{''.join(sections(report))}</body></html>\n"
    )


def sections(report: Report) -> Iterator[str]:
    yield f"<h1>mlxrt bench: {escape(str(report.model.get('name', 'no model')))}</h1>"
    yield f"<p>{escape(report.created)}, {report.seconds:.0f} s</p>"
    yield from (f"<p>{escape(line)}</p>" for line in format_heading(report))
    yield from (f"<p><strong>{escape(line)}</strong></p>" for line in format_headline(report))
    alarms = [*report.wrong, *report.problems, *report.notes]
    if not report.complete:
        alarms.append("not complete: the run was interrupted, or its time was up")
    yield from (f'<p class="alarm">{escape(line)}</p>' for line in alarms)
    for suite in dict.fromkeys(f.suite for f in report.figures):
        yield f"<h2>{escape(suite)}</h2>"
        found = [f for f in report.figures if f.suite == suite]
        yield engine_table(found) if has_many_engines(found) else figure_table(found)
    yield from (to_svg(plot) for plot in plots(report))
    yield "<h2>Tokens, notes</h2>"
    yield from (f"<p>{escape(line)}</p>" for line in format_summary(report))
    yield "<h2>Settings</h2>"
    groups = {"settings": report.settings, "machine": report.machine, "model": report.model, "engines": report.backends}
    yield table([], [[f"{g}: {k}", show(v)[:400]] for g, values in groups.items() for k, v in values.items()])


def show(value: object) -> str:
    """A setting in words."""
    if value is None:
        return "by default"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return format_value(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {show(v)}" for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(show, value))
    return str(value)


def table(head: list[str], rows: list[list[str | tuple[str, str]]]) -> str:
    """A cell is text, or text and its class."""

    def cell(value: str | tuple[str, str]) -> str:
        text, kind = value if isinstance(value, tuple) else (value, "")
        return f'<td class="{kind}">{escape(text)}</td>' if kind else f"<td>{escape(text)}</td>"

    first = f"<tr>{''.join(f'<th>{escape(text)}</th>' for text in head)}</tr>" if head else ""
    lines = ["<tr>" + "".join(map(cell, row)) + "</tr>" for row in rows]
    return f'<div class="wide"><table>{first}{"".join(lines)}</table></div>'


def figure_table(figures: list[Figure]) -> str:
    names, peers = engine_names(figures), list(dict.fromkeys(peer for f in figures for peer in f.ratios))
    rows: list[list[str | tuple[str, str]]] = []
    for f in figures:
        row: list[str | tuple[str, str]] = [f"{f.case}, {f.what} {f.unit}"]
        row += [format_value(f.engines[name].median) if name in f.engines else "" for name in names]
        found = [f.ratios.get(peer) for peer in peers]
        row += [(format_ratio(r), r.conclusion) if r else "" for r in found]
        share = f.roofline_share(OURS)
        rows.append([*row, f"{share:.1%}" if share is not None else ""])
    return table(["", *names, *(f"to {p}" for p in peers), "of roofline"], rows)


def engine_table(figures: list[Figure]) -> str:
    """Many configurations of one engine: a row each, a column a figure, relative to mlxrt's first."""
    rows: list[list[str | tuple[str, str]]] = []
    for name in engine_names(figures):
        row: list[str | tuple[str, str]] = [name]
        for f in figures:
            value = format_value(f.engines[name].median) if name in f.engines else ""
            r = f.ratios.get(name)
            row.append((f"{value} {relative_to_ours(f, name)}", r.conclusion) if r else value)
        rows.append(row)
    return table(["", *(f"{f.case}, {f.what} {f.unit}" for f in figures)], rows)
