"""A short fuzz run. The long one: python -m tests.long.fuzz_checkpoints --count 2000 --seed N."""

import os
import time
from pathlib import Path

import pytest

from mlxrt.errors import BadCheckpoint
from tests.long.fuzz_checkpoints import FINE, WHOLE, fuzz, make_seeds
from tests.support.fuzz import child
from tests.support.fuzz.mutate import Case
from tests.support.fuzz.pool import load_all


@pytest.fixture(scope="module")
def seeds():
    return make_seeds()


def test_undamaged_files_load(seeds):
    whole = [Case(name, seeds[name]) for name in WHOLE]
    assert [(o.case.target, o.outcome, o.details) for o in load_all(seeds, whole, 1)] == [
        (c.target, "ok", "") for c in whole
    ]


def test_damaged_files_are_refused_in_one_line(seeds):
    outcomes = fuzz(seeds, count=150, number=7)
    bad = [f"{o.case.target}: {o.outcome}: {o.details}" for o in outcomes if o.outcome not in FINE]
    assert not bad, "\n".join(bad[:5])
    assert len(outcomes) == 150 and {o.outcome for o in outcomes} == set(FINE)


def misbehave(pipe, log) -> None:
    """A child that does what its input says."""
    pipe.send(("ready", ""))
    while True:
        what = (Path(pipe.recv()) / "config.json").read_text()
        if what == "die":
            os.abort()
        if what == "hang":
            time.sleep(600)
        pipe.send(("ok", what))


def test_deaths_and_hangs_belong_to_their_input():
    cases = [Case("config.json", what.encode()) for what in ("fine", "die", "fine again", "hang", "well")]
    outcomes = load_all({"config.json": b""}, cases, 1, serve=misbehave, limit=3)
    assert [(o.case.blob.decode(), o.outcome) for o in outcomes] == [
        ("fine", "ok"),
        ("die", "died"),
        ("fine again", "ok"),
        ("hang", "hung"),
        ("well", "ok"),
    ]


@pytest.mark.parametrize(
    "error, outcome",
    [
        (None, "ok"),
        (BadCheckpoint("a line"), "refused"),
        (BadCheckpoint("two\nlines"), "failed"),
        (BadCheckpoint(""), "failed"),
        (KeyError("x"), "failed"),
        (MemoryError(), "failed"),
        (RecursionError(), "failed"),
        (SystemExit(), "failed"),
    ],
)
def test_only_typed_one_line_errors_pass(monkeypatch, error, outcome):
    def stage(path):
        if error:
            raise error

    for name in ("weights", "text", "whole"):
        monkeypatch.setattr(child, name, stage)
    assert child.load_all(Path("x"))[0] == outcome
