"""A report goes to JSON and back, becomes a page, is compared and kept; one of another form is refused in a line."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from mlxrt.bench.bench_model import hide_home
from mlxrt.bench.compare import compare_reports, format_changes, format_history, save_to_history
from mlxrt.bench.html import render_html
from mlxrt.bench.result import OURS, Report, figure
from mlxrt.bench.table import format_report
from mlxrt.errors import BadRequest


def made(speed=100.0, noise=0.01, peer=80.0, seed=0, rounds=12):
    chance = np.random.default_rng(seed)
    values = {
        name: list(rate * np.exp(chance.normal(0, noise, rounds))) for name, rate in ((OURS, speed), ("mlx-lm", peer))
    }
    agreement = {"hashes": {}, "compared": {"mlx-lm": 12}, "equal": {"mlx-lm": 12}, "differences": [], "remarks": []}
    at = {"context": 64, "flops": 1e6, "intensity": 0.5}
    gaps = {name: [1e3 / v for v in found] for name, found in values.items()}
    decode = figure(
        "decode", "after 64", "decode", "tok/s", values, roofline=400.0, at=at, agreement=agreement, latencies=gaps
    )
    memory = {name: [5.0, 5.1] for name in values}
    kinds = {name: [1.0 + i] for i, name in enumerate((OURS, "mlxrt q8", "mlxrt q4", "mlx-lm", "mlx-lm 8 bit"))}
    return Report(
        model={"name": "tiny", "digest": "0" * 64},
        machine={"name": "m", "system": "s", "processor": "p", "libraries": {"mlx": "0.32.4"}},
        device_peak={"device": "cpu", "copy_bytes_per_s": 1e10, "matmul_float32_flops": 1e11},
        backends={OURS: {"dtype": "float32", "engine": "mlxrt"}, "mlx-lm": {"engine": "mlx-lm 1"}},
        figures=[
            decode,
            figure("decode", "after 64", "peak memory", "MB", memory, higher=False, at=at),
            figure("kv", "after 64", "memory", "bytes/token", kinds, higher=False),
        ],
        created="2026-11-15T05:00:00+00:00",
        complete=True,
    )


def test_json_and_back(tmp_path):
    report = made()
    report.save(tmp_path / "deep" / "a.json")
    assert Report.load(tmp_path / "deep" / "a.json") == report
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "format"),
        ('{"format": "other"}', "format"),
        ('{"format": "mlxrt-bench", "version": 99}', "version 99"),
        ('{"format": "mlxrt-bench", "version": 1}', "damaged"),
        ('{"format": "mlxrt-bench", "version": 1, "figures": [{}]}', "damaged"),
    ],
)
def test_another_file_is_refused_in_a_line(tmp_path, text, message):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(BadRequest, match=message) as caught:
        Report.load(tmp_path / "x.json")
    assert "\n" not in str(caught.value)


def test_a_report_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(BadRequest, match="cannot be read"):
        Report.load(tmp_path / "none.json")


class Closed(HTMLParser):
    """Every tag that is opened is closed, in order."""

    def __init__(self):
        super().__init__()
        self.open, self.count = [], {}

    def handle_starttag(self, tag, attrs):
        self.count[tag] = self.count.get(tag, 0) + 1
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.count[tag] = self.count.get(tag, 0) + 1

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_page_is_complete_and_needs_nothing_else():
    pytest.importorskip("matplotlib")
    report = made()
    report.settings["peers"] = None
    report.model["name"] = "<script>alert(1)</script>"
    text = render_html(report)
    seen = Closed()
    seen.feed(text.removeprefix("<!doctype html>"))
    assert seen.open == [] and seen.count["svg"] >= 5 and seen.count["table"] >= 3
    assert "<script" not in text and "src=" not in text and "http" not in text.replace("http-equiv", "")
    assert "25.0%" in text  # the share of the roofline
    assert "settings: peers</td><td>by default" in text and "machine: libraries</td><td>mlx 0.32.4" in text


def test_page_of_an_interrupted_run_says_so():
    assert "interrupted" in render_html(Report())


def test_table_names_engines_ratios_and_roofline():
    text = "\n".join(format_report(made()))
    assert (
        re.search(r"mlx-lm 1\.2\d\d \[\S+, \S+\] faster", text)
        and "25.0% of roofline" in text
        and "12 of 12 answers" in text
    )
    assert "mlx-lm 8 bit" in text  # kinds are rows
    assert re.search(r"^mlxrt beside mlx-lm, \d figures: faster in \d", text, re.M)


@pytest.mark.parametrize(
    ("speed", "peer", "conclusion"), [(100.0, 80.0, "same"), (115.0, 80.0, "faster"), (88.0, 80.0, "slower")]
)
def test_compare_finds_what_changed(speed, peer, conclusion):
    found = compare_reports(made(seed=1), made(speed, peer=peer, seed=2), 0.95)
    assert found[0].conclusion == conclusion
    assert conclusion in "\n".join(format_changes(made(), made(), found))


def test_compare_blames_the_machine_where_the_peer_changed_alike():
    found = compare_reports(made(seed=1), made(70.0, peer=56.0, seed=2), 0.95)
    assert found[0].ratio.conclusion == "slower" and found[0].conclusion == "same"


def test_compare_says_what_is_not_the_same():
    other = made()
    other.model = other.model | {"digest": "1" * 64}
    text = "\n".join(format_changes(made(), other, compare_reports(made(), other, 0.95)))
    assert "NOT THE SAME model" in text
    bare = replace(other, figures=[])
    assert "no figure in common" in "\n".join(format_changes(made(), bare, compare_reports(made(), bare, 0.95)))


def test_history_lists_runs_by_machine(tmp_path):
    first, second = made(), made(120.0)
    second.created = "2026-11-16T05:00:00+00:00"
    for report in (first, second):
        path = save_to_history(report, tmp_path)
        assert path.parent.parent == tmp_path and json.loads(path.read_text())["version"] == 1
    text = "\n".join(format_history(tmp_path))
    assert text.index("2026-11-15") < text.index("2026-11-16") and "decode / after 64" in text
    with pytest.raises(BadRequest, match="not a folder"):
        list(format_history(tmp_path / "none"))


def test_a_report_names_no_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hide_home(tmp_path / "models" / "a.gguf") == "~/models/a.gguf"
    assert hide_home(Path("/elsewhere/a.gguf")) == "/elsewhere/a.gguf"
