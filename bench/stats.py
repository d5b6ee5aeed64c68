"""Medians, ratios and their intervals, and how busy the machine is. Knows nothing of engines."""

import os
import random
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

RESAMPLES = 4000
BUSY_LOAD = 0.5  # of other processes, before we start


@dataclass(frozen=True)
class Ratio:
    """Median of the rounds' ratios a / b, with a bootstrap 95 % interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def paired_ratio(a: list[float], b: list[float]) -> Ratio:
    """a[i] and b[i] ran next to each other, so what the machine did to one it did to the other."""
    ratios = [x / y for x, y in zip(a, b, strict=True)]
    return interval(ratios, lambda chosen: statistics.median(chosen))


def median_ratio(a: list[float], b: list[float]) -> Ratio:
    """Ratio of medians, for samples that belong to no pairs."""
    chance = random.Random(0)
    draw = lambda x: statistics.median(chance.choices(x, k=len(x)))  # noqa: E731
    found = sorted(draw(a) / draw(b) for _ in range(RESAMPLES))
    return Ratio(statistics.median(a) / statistics.median(b), *ends(found))


def interval(values: list[float], figure: Any) -> Ratio:
    chance = random.Random(0)
    found = sorted(figure(chance.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return Ratio(figure(values), *ends(found))


def ends(found: list[float]) -> tuple[float, float]:
    return found[int(0.025 * len(found))], found[int(0.975 * len(found)) - 1]


@dataclass(frozen=True)
class Machine:
    """What else the machine does."""

    load: float  # processes that want a core, last minute
    cores: int
    share: float  # of a core that a busy loop got

    @property
    def busy(self) -> bool:
        return self.load > BUSY_LOAD or self.share < 0.95

    def __str__(self) -> str:
        state = "BUSY: figures are noisy" if self.busy else "quiet"
        return f"load {self.load:.2f} on {self.cores} cores, a loop gets {self.share:.0%} of a core ({state})"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"busy": self.busy}


def look_at_machine(seconds: float = 1.0) -> Machine:
    """Spin for a moment and see how much of it was granted."""
    load = os.getloadavg()[0]
    wall, used = time.perf_counter(), time.process_time()
    while time.perf_counter() - wall < seconds:
        sum(range(1000))
    share = (time.process_time() - used) / (time.perf_counter() - wall)
    return Machine(load, os.cpu_count() or 1, min(share, 1.0))
