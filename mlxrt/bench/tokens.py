"""Whether engines said the same. Greedy tokens of the same weights must agree; where they do not, how far apart the
two choices lie in our own logits decides whether it was a rounding or a wrong answer.

Knows no engine: it is given the answers, and a way to ask for a gap.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

TIES = {"float32": 1e-2, "float16": 0.1, "bfloat16": 0.5}  # logits apart, by what is computed in
TIE_8BIT = 0.5  # llama.cpp rounds activations to 8 bit
LOOP = 4  # an answer whose second half repeats so few tokens goes round in a circle

Gap = Callable[[list[int], list[int]], float]


def token_hash(tokens: Sequence[int]) -> str:
    return hashlib.sha256(",".join(map(str, tokens)).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Difference:
    """Where a side's answer leaves ours for the first time."""

    side: str
    place: int  # tokens before it
    ours: int
    theirs: int
    gap: float | None  # logits their token lies below ours; None: not asked
    tie: float  # up to here it is a rounding

    @property
    def wrong(self) -> bool:
        return self.gap is None or self.gap > self.tie

    def __str__(self) -> str:
        kind = "WRONG" if self.wrong else "a tie"
        told = "unknown" if self.gap is None else f"{self.gap:.2e}"
        return (
            f"{self.side} differs at token {self.place}: mlxrt {self.ours}, {self.side} {self.theirs}, "
            f"{told} apart in our logits ({kind}, up to {self.tie:g} may be rounding)"
        )


@dataclass
class Agreement:
    """The answers of one case: who said what, over all repetitions."""

    hashes: dict[str, list[str]] = field(default_factory=dict)  # side -> every different answer's hash
    compared: Counter[str] = field(default_factory=Counter)  # side -> answers compared with ours
    equal: Counter[str] = field(default_factory=Counter)
    differences: list[Difference] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> list[Difference]:
        return [d for d in self.differences if d.wrong]

    def note(self, side: str, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        """An answer; the same side must give the same one to the same prompt."""
        mark = f"{token_hash(prompt)}:{token_hash(tokens)}"
        seen = self.hashes.setdefault(side, [])
        if mark in seen:
            return
        if any(other.split(":")[0] == mark.split(":")[0] for other in seen):
            self.remark(f"{side} gave two answers to one prompt ({mark})")
        seen.append(mark)
        if period := loops(tokens):
            self.remark(f"{side}'s answer goes round in a circle of {period}")

    def remark(self, text: str) -> None:
        if text not in self.remarks:
            self.remarks.append(text)

    def compare(self, side: str, prompt: list[int], ours: list[int], theirs: list[int], tie: float, gap: Gap) -> None:
        self.compared[side] += 1
        place = first_difference(ours, theirs)
        if place is None:
            self.equal[side] += 1
            return
        a, b = at(place, ours, theirs)
        if any((d.side, d.place, d.ours, d.theirs) == (side, place, a, b) for d in self.differences):
            return
        apart = None if a < 0 or b < 0 else gap([*prompt, *ours[:place]], [a, b])
        self.differences.append(Difference(side, place, a, b, apart, tie))

    def to_dict(self) -> dict[str, Any]:
        return {
            "hashes": self.hashes,
            "compared": dict(self.compared),
            "equal": dict(self.equal),
            "differences": [asdict(d) | {"wrong": d.wrong} for d in self.differences],
            "remarks": self.remarks,
        }


def at(place: int, ours: Sequence[int], theirs: Sequence[int]) -> tuple[int, int]:
    """The two tokens; -1 where an answer had ended."""
    a, b = (answer[place] if place < len(answer) else -1 for answer in (ours, theirs))
    return a, b


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    if list(a) == list(b):
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def loops(tokens: Sequence[int]) -> int | None:
    """The period of an answer whose second half only repeats itself; None where it does not, or is too short to say."""
    tail = list(tokens[len(tokens) // 2 :])
    for period in range(1, LOOP + 1):
        if len(tail) >= 3 * period + 2 and all(tail[i] == tail[i - period] for i in range(period, len(tail))):
            return period
    return None
