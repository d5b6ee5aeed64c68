"""Writes the table of docs/benchmarks.md from a report, between its two marks.

    python -m bench.readme bench/results/MACHINE/RUN.json [--check]

`--check` changes nothing and exits 1 where the page does not show this report.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from mlxrt.bench.result import OURS, Figure, Report
from mlxrt.bench.table import format_ratio, format_value
from mlxrt.errors import MlxrtError

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- bench: made by python -m bench.readme -->", "<!-- bench: end -->"
SUITES = ("decode", "prefill", "prefix", "batch", "startup")
HIDDEN = ("peak memory", "first token cold")


def rows(report: Report, path: str) -> Iterator[str]:
    peers = [name for name, info in report.backends.items() if name != OURS and "absent" not in info]
    clock = report.settings["clock"]
    busy = "busy" if report.machine["before"]["busy"] else "quiet"
    minutes = report.settings["minutes"]
    command = "make bench" if minutes == 8 else f'make bench BENCH="--minutes {minutes:g}"'
    yield from ("", "```", command, "```", "")
    yield "| | mlxrt | " + " | ".join(peers) + " | " + " | ".join(f"ratio to {p}" for p in peers) + " | of roofline |"
    yield "|---" * (3 + 2 * len(peers)) + "|"
    for f in report.figures:
        if f.suite in SUITES and f.what not in HIDDEN:
            yield row(f, peers)
    yield ""
    yield (
        f"{report.model['name']}, {report.created[:10]}, {report.machine['name']} ({busy}), "
        f"{report.settings['threads']} thread{'s' * (report.settings['threads'] > 1)} each, {clock} clock, "
        f"ratios above 1: mlxrt is better, {100 * report.settings['level']:g} % intervals where no other level is "
        f"given. [Report]({path})."
    )
    if not report.complete:
        yield ""
        yield "Time was up before every suite had its turn: the report says which are missing."
    yield ""


def row(f: Figure, peers: list[str]) -> str:
    values = [format_value(f.engines[name].median) if name in f.engines else "" for name in (OURS, *peers)]
    ratios = [format_ratio(f.ratios[p]).lstrip("+-=?") if p in f.ratios else "" for p in peers]
    share = f.roofline_share(OURS)
    name = f"{f.suite} {f.case}" + ("" if f.what == f.suite else f", {f.what}")
    return "| " + " | ".join([f"{name}, {f.unit}", *values, *ratios, f"{share:.0%}" if share else ""]) + " |"


def fill_table(text: str, report: Report, path: str) -> str:
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return head + BEGIN + "\n" + "\n".join(rows(report, path)) + "\n" + END + tail


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("report", type=Path)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    try:
        report = Report.load(options.report)
    except MlxrtError as error:
        print(error, file=sys.stderr)
        return 2
    path = "../" + options.report.resolve().relative_to(ROOT).as_posix()
    old = PAGE.read_text(encoding="utf-8")
    new = fill_table(old, report, path)
    if options.check:
        return 0 if new == old else 1
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
