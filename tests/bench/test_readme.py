"""The table of docs/benchmarks.md is generated from the report it links."""

import re

from bench.readme import BEGIN, PAGE, fill_table
from mlxrt.bench.result import Report


def test_page_shows_the_report_it_links():
    text = PAGE.read_text(encoding="utf-8")
    block = text.partition(BEGIN)[2]
    linked = re.search(r"\[Report\]\((\.\./bench/results/[^)]+\.json)\)", block)
    assert linked, "docs/benchmarks.md links no report; python -m bench.readme REPORT puts one there"
    assert fill_table(text, Report.load(PAGE.parent / linked[1]), linked[1]) == text
