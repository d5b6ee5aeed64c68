"""Kernels: every op of the registry against plain MLX on its own cases, and the bytes it moves against copying.

The arrays of a case are in the device's cache after the first launch, so a small case may exceed the memory roofline.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from ..backend import Backend
from ..comparison import Comparison, Options
from ..interleave import Reply
from ..result import OURS, Figure
from . import Case

REFERENCE = "MLX's own"


def cases(options: Options) -> list[Case]:
    return [Case("kernels", "every op", run, weight=4.0)]


def microseconds(reply: Reply) -> float:
    return 1e6 * reply["seconds"]


def run(comparison: Comparison) -> Iterator[Figure]:
    with Backend("kernels", {}) as backend:
        todo = backend.ask(do="list")
        comparison.time_limit /= max(1, len(todo))
        for number, case in enumerate(todo):
            yield measure(comparison, backend, number, case)


def measure(comparison: Comparison, backend: Backend, number: int, case: dict[str, Any]) -> Figure:
    def launch(which: str, r: int) -> Reply:
        return backend.ask(do="time", number=number, which=which)

    error = backend.ask(do="error", number=number)
    engines = {OURS: partial(launch, "kernel"), REFERENCE: partial(launch, "plain")}
    rounds = comparison.interleave(f"{case['op']}, {case['case']}").run(engines, [microseconds], warmup=2)
    values = rounds.values(microseconds)
    roofline = 1e6 * case["bytes"] / comparison.device_peak["copy_bytes_per_s"]
    notes = [f"{case['bytes'] / 1e6:.2f} MB moved, {case['bytes'] / min(values[OURS]) / 1e3:,.0f} GB/s"]
    if error["error"] > error["allowed"]:
        notes.append(f"WRONG: error {error['error']:.1e}, {error['allowed']:.1e} is allowed")
        comparison.problems.append(f"kernel {case['op']}, {case['case']}, {case['dtype']}: {notes[-1]}")
    name = f"{case['op']} {case['case']} {case['dtype']}"
    return comparison.figure(
        "kernels", name, "launch", "us", values, higher=False, roofline=roofline, notes=tuple(notes)
    )
