"""A report as one HTML file: tables and plots, no script, nothing from the network."""

from collections.abc import Iterator
from html import escape

from .plots import drawings
from .result import OURS, Figure, Report
from .table import against, amount, heading, is_tall, told, verdicts

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1b1f24; --soft: #6a737d; --line: #e1e4e8; --card: #f8f9fa }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14171a; --ink: #e6e8ea; --soft: #9aa4ad; --line: #30363d; --card: #1b1f23 } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1000px;
  margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem; margin: 0 0 .3rem } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem }
p, .soft { color: var(--soft); margin: .2rem 0 }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .88rem }
th, td { padding: .3rem .5rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line) }
th:first-child, td:first-child { text-align: left } th { color: var(--soft); font-weight: 600; white-space: normal }
.wide { overflow-x: auto } .better { color: #0a7d4f } .worse { color: #c4450c } .unsure { color: var(--soft) }
@media (prefers-color-scheme: dark) { .better { color: #4cc38a } .worse { color: #ff8a5c } }
.plots { display: flex; flex-wrap: wrap; gap: 1rem }
.plot { background: var(--card); border-radius: 8px; padding: .8rem }
.plot h3 { font-size: .95rem; margin: 0 0 .3rem } svg { max-width: 100%; height: auto; display: block }
svg text { font: 11px system-ui, sans-serif; fill: var(--ink) } svg .name { fill: var(--soft) }
svg .grid { stroke: var(--line); fill: none } svg .axis { stroke: var(--soft); fill: none; stroke-width: 1.2 }
.key { margin-right: 1rem; font-size: .85rem } .key i { display: inline-block; width: .7rem; height: .7rem;
  border-radius: 50%; margin-right: .35rem } .legend { margin-bottom: .3rem }
.facts td { white-space: normal; overflow-wrap: anywhere }
.alarm { border-left: 4px solid #c4450c; padding: .3rem .8rem; background: var(--card) }
"""
CLASSES = {"faster": "better", "slower": "worse", "same": "unsure", "unsure": "unsure"}


def page(report: Report) -> str:
    name = escape(str(report.model.get("name", "no model")))
    body = "".join(parts(report))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>mlxrt bench: {name}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>'
        f"<body>{body}</body></html>\n"
    )


def parts(report: Report) -> Iterator[str]:
    yield f"<h1>mlxrt bench: {escape(str(report.model.get('name', 'no model')))}</h1>"
    yield f"<p>{escape(report.created)}, {report.seconds:.0f} s</p>"
    yield from (f"<p>{escape(line)}</p>" for line in heading(report))
    alarms = [
        *report.wrong,
        *report.problems,
        *report.notes,
        *([] if report.complete else ["not complete: the run was interrupted, or its time was up"]),
    ]
    yield from (f'<p class="alarm">{escape(line)}</p>' for line in alarms)
    for suite in dict.fromkeys(f.suite for f in report.figures):
        yield f"<h2>{escape(suite)}</h2>"
        found = [f for f in report.figures if f.suite == suite]
        yield tall(found) if is_tall(found) else table(found)
    if drawn := list(drawings(report)):
        yield '<h2>Plots</h2><div class="plots">'
        for d in drawn:
            remark = f'<p class="soft">{escape(d.remark)}</p>' if d.remark else ""
            yield f'<div class="plot"><h3>{escape(d.title)}</h3>{d.svg}{remark}</div>'
        yield "</div>"
    yield "<h2>Tokens, notes</h2>"
    yield from (f"<p>{escape(line)}</p>" for line in verdicts(report))
    yield "<h2>Settings</h2>" + facts(report)


def table(figures: list[Figure]) -> str:
    names = list(dict.fromkeys(name for f in figures for name in f.sides))
    peers = list(dict.fromkeys(peer for f in figures for peer in f.ratios))
    head = "".join(f"<th>{escape(n)}</th>" for n in ["", *names, *(f"to {p}" for p in peers)])
    roofed = any(f.roof for f in figures)
    rows = "".join(row(f, names, peers, roofed) for f in figures)
    last = "<th>of roof</th>" if roofed else ""
    return f'<div class="wide"><table><tr>{head}{last}</tr>{rows}</table></div>'


def tall(figures: list[Figure]) -> str:
    """Many kinds of one engine: a row each, a column a figure, and how it compares with mlxrt's first kind."""
    names = list(dict.fromkeys(name for f in figures for name in f.sides))
    heads = "".join(f"<th>{escape(f'{f.case}, {f.what} {f.unit}')}</th>" for f in figures)
    rows = []
    for name in names:
        cells = []
        for f in figures:
            value = amount(f.sides[name].median) if name in f.sides else ""
            r = f.ratios.get(name)
            beside = f' <span class="{CLASSES[r.verdict]}">{escape(against(f, name))}</span>' if r else ""
            cells.append(f"<td>{value}{beside}</td>")
        rows.append(f"<tr><td>{escape(name)}</td>{''.join(cells)}</tr>")
    return f'<div class="wide"><table><tr><th></th>{heads}</tr>{"".join(rows)}</table></div>'


def row(f: Figure, names: list[str], peers: list[str], roofed: bool) -> str:
    cells = [f"<td>{escape(f'{f.case}, {f.what}')} <span class=soft>{escape(f.unit)}</span></td>"]
    for name in names:
        s = f.sides.get(name)
        cells.append(f'<td title="{spread(f, name)}">{amount(s.median)}</td>' if s else "<td></td>")
    for peer in peers:
        r = f.ratios.get(peer)
        cells.append(f'<td class="{CLASSES[r.verdict]}">{escape(told(r)[1:])}</td>' if r else "<td></td>")
    if roofed:
        share = f.share(OURS)
        cells.append(f"<td>{share:.1%}</td>" if share is not None else "<td></td>")
    return f"<tr>{''.join(cells)}</tr>"


def spread(f: Figure, name: str) -> str:
    s = f.sides[name]
    return escape(f"quartiles {amount(s.low)} to {amount(s.high)}, {len(s.values)} rounds")


def facts(report: Report) -> str:
    found = {"settings": report.settings, "machine": report.machine, "model": report.model, "engines": report.sides}
    flat = [(f"{group}: {key}", value) for group, values in found.items() for key, value in values.items()]
    rows = "".join(f"<tr><td>{escape(str(k))}</td><td>{escape(str(v)[:400])}</td></tr>" for k, v in flat)
    return f'<div class="wide facts"><table>{rows}</table></div>'
