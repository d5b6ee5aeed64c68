"""What the server counts itself, by a clock of the test's own."""

from types import SimpleNamespace

import pytest

from mlxrt.engine.request import Event, Finish, Timings
from mlxrt.server.metrics import ServerMetrics

END = Event(1, finish_reason=Finish.STOP, timings=Timings(prompt_tokens=1, generated_tokens=1))


@pytest.mark.parametrize(
    ("ends", "asked_at", "expected"),
    [
        ([], 5.0, 1.0),
        ([100.0], 100.0, 1.0),
        ([100.0, 102.0, 106.0], 106.0, 3.0),
        ([100.0, 102.0, 106.0], 166.0, 3.0),  # nothing was asked for a minute
        ([100.0, 102.0, 106.0], 3706.0, 1.0),
        ([100.0, 102.0, 3706.0, 3706.5], 3707.0, 0.5),
        ([float(i) for i in range(100)], 99.0, 1.0),
    ],
)  # fmt: skip
def test_who_is_told_to_wait_is_told_how_often_requests_end(monkeypatch, ends, asked_at, expected):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(
        "mlxrt.server.metrics.time", SimpleNamespace(monotonic=lambda: clock.now, time=lambda: clock.now)
    )
    metrics = ServerMetrics()
    for clock.now in ends:
        metrics.record(END)
    clock.now = asked_at
    assert metrics.seconds_per_request() == expected
