"""Every example runs, on a tiny model, and prints what it promises."""

import runpy
import sys
from pathlib import Path

import pytest

from .cli.conftest import folder  # noqa: F401  a fixture

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
PRINTED = {
    "stream": "tok/s]",
    "batch": "'The capital of Italy is' -> ",
    "async_engine": "'The sky is' -> ",
    "session": "restored: ",
    "callbacks": "request 1: finished, 6 tokens",
    "convert": "of 32 positions",
}


def test_every_example_is_listed():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*PRINTED, "demo"}  # make demo runs that one


@pytest.mark.parametrize("name", PRINTED)
def test_example(name, folder, capsys, monkeypatch):  # noqa: F811
    monkeypatch.setattr(sys, "argv", [f"{name}.py", str(folder)])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert PRINTED[name] in capsys.readouterr().out
