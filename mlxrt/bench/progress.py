"""Progress of a benchmark: one line redrawn on a terminal, one line a case elsewhere."""

import sys
import time
from dataclasses import dataclass, field
from typing import TextIO

WIDTH = 24


@dataclass
class Progress:
    """Cases have weights; the time left assumes the pace so far."""

    total: float
    stream: TextIO = field(default_factory=lambda: sys.stderr)
    done: float = 0.0
    current: float = 0.0
    began: float = field(default_factory=time.perf_counter)

    def begin(self, weight: float, label: str) -> None:
        self.current = weight
        if not self.stream.isatty():
            print(f"  {label} ...", file=self.stream, flush=True)

    def update(self, label: str, rounds: int, share: float) -> None:
        if self.stream.isatty():
            part = min(1.0, (self.done + self.current * min(share, 1.0)) / self.total)
            bar = "#" * round(WIDTH * part) + "." * (WIDTH - round(WIDTH * part))
            text = f"[{bar}] {part:4.0%}  {label}, round {rounds}  {self.time_left(part)} left"
            print(f"\r{text:<78}"[:100], end="", file=self.stream, flush=True)

    def time_left(self, part: float) -> str:
        seconds = (time.perf_counter() - self.began) * (1 - part) / max(part, 0.01)
        return f"{seconds // 60:.0f}:{seconds % 60:02.0f}"

    def end(self) -> None:
        self.done += self.current
        self.current = 0.0
        if self.stream.isatty():
            print(f"\r{'':<100}\r", end="", file=self.stream, flush=True)
