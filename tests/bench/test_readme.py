"""README's table is the one its report gives: nobody has typed a figure."""

import re

from bench.readme import BEGIN, README, fill_table
from mlxrt.bench.result import Report


def test_readme_shows_the_report_it_links():
    text = README.read_text(encoding="utf-8")
    block = text.partition(BEGIN)[2]
    linked = re.search(r"\[Report\]\((bench/results/[^)]+\.json)\)", block)
    assert linked, "README links no report; python -m bench.readme REPORT puts one there"
    assert fill_table(text, Report.load(README.parent / linked[1]), linked[1]) == text
