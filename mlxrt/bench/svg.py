"""Plots as SVG text: axes, lines with their spread, points, bars. Knows numbers and names, nothing of benchmarks.

No library and no script: a report is one file that opens anywhere, and a value is read by pointing at it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

# Okabe and Ito's colours: told apart by everybody, on white and on black.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31")
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 44


@dataclass(frozen=True)
class Axis:
    """From values to places, and which values get a tick."""

    low: float
    high: float
    log: bool = False

    @classmethod
    def around(cls, values: Sequence[float], *, log: bool = False, zero: bool = False) -> "Axis":
        low, high = min(values), max(values)
        if log:
            low, high = max(low, 1e-12) / 1.25, max(high, 1e-12) * 1.25
            return cls(low, high, True)
        low = 0.0 if zero else low
        room = 0.06 * (high - low or abs(high) or 1.0)
        return cls(low if zero else low - room, high + room)

    def part(self, value: float) -> float:
        """0 at the low end, 1 at the high one."""
        if self.log:
            return math.log(max(value, 1e-12) / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        if self.log:
            found = log_ticks(self.low, self.high)
            return found if len(found) > 1 else even_ticks(self.low, self.high)
        return even_ticks(self.low, self.high)


def even_ticks(low: float, high: float, most: int = 6) -> list[float]:
    rough = (high - low) / most
    power = 10 ** math.floor(math.log10(rough))
    step = next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= rough)
    first = math.ceil(low / step)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if len(powers) <= 3 else (1,)
    return [s * 10**p for p in powers for s in steps if low <= s * 10**p <= high]


def brief(value: float) -> str:
    if value == 0:
        return "0"
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (size if unit != 'k' else 1e3):.3g}{unit}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


@dataclass
class Plot:
    """A frame with two axes; what is drawn lies inside it."""

    x: Axis
    y: Axis
    x_name: str
    y_name: str
    width: int = 460
    height: int = 280
    x_ticks: Sequence[float] | None = None
    parts: list[str] = field(default_factory=list)

    def at(self, x: float, y: float) -> tuple[float, float]:
        right, bottom = self.width - RIGHT, self.height - BOTTOM
        return LEFT + self.x.part(x) * (right - LEFT), bottom - self.y.part(y) * (bottom - TOP)

    def line(self, points: Sequence[tuple[float, float]], colour: str, *, dashed: bool = False) -> None:
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in (self.at(*p) for p in points))
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')

    def point(self, x: float, y: float, colour: str, told: str, low: float | None = None, high: float | None = None):
        a, b = self.at(x, y)
        if low is not None and high is not None:
            c, d = self.at(x, low)[1], self.at(x, high)[1]
            self.parts.append(f'<path d="M{a:.1f} {c:.1f}V{d:.1f}" stroke="{colour}" stroke-width="1.5"/>')
        self.parts.append(
            f'<circle cx="{a:.1f}" cy="{b:.1f}" r="4" fill="{colour}"><title>{escape(told)}</title></circle>'
        )

    def label(self, x: float, y: float, text: str) -> None:
        """Below a point."""
        a, b = self.at(x, y)
        self.parts.append(f'<text x="{a:.1f}" y="{b + 18:.1f}" text-anchor="middle">{escape(text)}</text>')

    def bar(self, left: float, width: float, y: float, colour: str, told: str) -> None:
        """In places, not values, along x: bars stand beside each other."""
        bottom = self.height - BOTTOM
        top = self.at(self.x.low, y)[1]
        self.parts.append(
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{max(0.5, bottom - top):.1f}" '
            f'fill="{colour}"><title>{escape(told)}</title></rect>'
        )

    def text(self) -> str:
        right, bottom = self.width - RIGHT, self.height - BOTTOM
        marks = []
        for tick in self.y.ticks():
            _, b = self.at(self.x.low, tick)
            marks.append(f'<path class="grid" d="M{LEFT} {b:.1f}H{right}"/>')
            marks.append(f'<text x="{LEFT - 6}" y="{b + 4:.1f}" text-anchor="end">{brief(tick)}</text>')
        for tick in self.x.ticks() if self.x_ticks is None else self.x_ticks:
            a, _ = self.at(tick, self.y.low)
            marks.append(f'<path class="grid" d="M{a:.1f} {TOP}V{bottom}"/>')
            marks.append(f'<text x="{a:.1f}" y="{bottom + 16}" text-anchor="middle">{brief(tick)}</text>')
        marks.append(f'<path class="axis" d="M{LEFT} {TOP}V{bottom}H{right}"/>')
        below = f'x="{(LEFT + right) / 2}" y="{self.height - 8}" text-anchor="middle"'
        marks.append(f'<text class="name" {below}>{escape(self.x_name)}</text>')
        turned = f'transform="rotate(-90)" x="{-(TOP + bottom) / 2}" y="13" text-anchor="middle"'
        marks.append(f'<text class="name" {turned}>{escape(self.y_name)}</text>')
        return frame(self.width, self.height, [*marks, *self.parts])


def frame(width: float, height: float, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">{"".join(parts)}</svg>'


def legend(names: Sequence[str], colours: dict[str, str]) -> str:
    keys = (f'<span class="key"><i style="background:{colours[n]}"></i>{escape(n)}</span>' for n in names)
    return f'<div class="legend">{"".join(keys)}</div>'
