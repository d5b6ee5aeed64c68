"""What a terminal sees: a bar, the round, the time left; and what a log sees: a line a case."""

import io

from mlxrt.bench import progress
from mlxrt.bench.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_bar_moves_with_the_weights_and_shows_the_time_left(monkeypatch):
    clock = iter([0.0, 10.0, 30.0])
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(clock))
    out = Terminal()
    shown = Progress(4.0, out, began=0.0)
    next(clock)
    shown.begin(1.0, "decode: after 8")
    shown.update("decode after 8", 3, 1.0)
    assert " 25%  decode after 8, round 3  0:30 left" in out.getvalue()
    shown.end()
    shown.begin(3.0, "prefill")
    shown.update("prefill", 1, 5.0)
    assert "100%" in out.getvalue().rpartition("\r")[2] and "0:00 left" in out.getvalue().rpartition("\r")[2]


def test_elsewhere_a_line_a_case():
    out = io.StringIO()
    shown = Progress(2.0, out)
    for name in ("one", "two"):
        shown.begin(1.0, name)
        shown.update(name, 1, 0.5)
        shown.end()
    assert out.getvalue() == "  one ...\n  two ...\n"
