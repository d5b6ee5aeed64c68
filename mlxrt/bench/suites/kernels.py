"""Kernels: every op of the registry against plain MLX, on its own cases; what it moves against what can be copied.

The arrays of a case lie in the device's cache after the first launch, so a small case may pass the roof of memory.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from ..contest import Contest, Options
from ..result import OURS, Figure
from ..side import Side
from ..turns import Reply
from . import Case

PLAIN = "MLX's own"


def cases(options: Options) -> list[Case]:
    return [Case("kernels", "every op", run, weight=4.0)]


def microseconds(reply: Reply) -> float:
    return 1e6 * reply["seconds"]


def run(contest: Contest) -> Iterator[Figure]:
    with Side("kernels", {}) as side:
        todo = side.ask(do="list")
        whole = contest.allowance
        for number, told in enumerate(todo):
            contest.allowance = whole / len(todo)
            yield measured(contest, side, number, told)


def measured(contest: Contest, side: Side, number: int, told: dict[str, Any]) -> Figure:
    def launch(which: str, r: int) -> Reply:
        return side.ask(do="time", number=number, which=which)

    error = side.ask(do="error", number=number)
    players = {OURS: partial(launch, "kernel"), PLAIN: partial(launch, "plain")}
    rounds = contest.turns(f"{told['op']}, {told['case']}").play(players, [microseconds], warm=2)
    values = rounds.values(microseconds)
    roof = 1e6 * told["bytes"] / contest.roof["copy_bytes_per_s"]
    notes = [f"{told['bytes'] / 1e6:.2f} MB moved, {told['bytes'] / min(values[OURS]) / 1e3:,.0f} GB/s"]
    if error["error"] > error["allowed"]:
        notes.append(f"WRONG: off by {error['error']:.1e}, {error['allowed']:.1e} is allowed")
        contest.problems.append(f"kernel {told['op']}, {told['case']}, {told['dtype']}: {notes[-1]}")
    case = f"{told['op']} {told['case']} {told['dtype']}"
    return contest.figure("kernels", case, "launch", "us", values, higher=False, roof=roof, notes=tuple(notes))
