"""Token agreement between engines. Greedy tokens of the same weights must be equal; where two engines differ, the gap
between both choices in our own logits tells a rounding difference from a wrong answer.

Knows no engine: it gets the answers and a function that returns a gap.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

TIES = {"float32": 1e-2, "float16": 0.1, "bfloat16": 0.5}  # largest gap of a rounding difference, by compute dtype
TIE_8BIT = 0.5  # llama.cpp rounds activations to 8 bit
MAX_LOOP = 4  # longest period that is reported as a repetition loop

Gap = Callable[[list[int], list[int]], float]


def token_hash(tokens: Sequence[int]) -> str:
    return hashlib.sha256(",".join(map(str, tokens)).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Difference:
    """The first token at which an engine's answer differs from ours."""

    engine: str
    index: int
    ours: int
    theirs: int
    gap: float | None  # how far their token's logit lies below ours; None: one of the answers ended
    tie: float  # up to this gap it is a rounding difference

    @property
    def wrong(self) -> bool:
        return self.gap is None or self.gap > self.tie

    def to_dict(self) -> dict[str, Any]:
        names = {"side": self.engine, "place": self.index}  # as reports of version 1 call them
        return names | {key: vars(self)[key] for key in ("ours", "theirs", "gap", "tie")} | {"wrong": self.wrong}


@dataclass
class Agreement:
    """The answers of one case by engine, over all rounds."""

    hashes: dict[str, list[str]] = field(default_factory=dict)  # engine -> hash of every distinct answer
    compared: Counter[str] = field(default_factory=Counter)  # engine -> answers compared with ours
    equal: Counter[str] = field(default_factory=Counter)
    differences: list[Difference] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> list[Difference]:
        return [d for d in self.differences if d.wrong]

    def record(self, engine: str, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        """Record an answer; an engine must give the same answer to the same prompt."""
        mark = f"{token_hash(prompt)}:{token_hash(tokens)}"
        known = self.hashes.setdefault(engine, [])
        if mark in known:
            return
        if any(other.split(":")[0] == mark.split(":")[0] for other in known):
            self.add_remark(f"{engine} gave two answers to one prompt ({mark})")
        known.append(mark)
        if period := loop_period(tokens):
            self.add_remark(f"{engine}'s answer repeats itself every {period} tokens")

    def add_remark(self, text: str) -> None:
        if text not in self.remarks:
            self.remarks.append(text)

    def compare(self, engine: str, prompt: list[int], ours: list[int], theirs: list[int], tie: float, gap: Gap) -> None:
        self.compared[engine] += 1
        index = first_difference(ours, theirs)
        if index is None:
            self.equal[engine] += 1
            return
        a, b = (answer[index] if index < len(answer) else -1 for answer in (ours, theirs))  # -1: it had ended
        if any((d.engine, d.index, d.ours, d.theirs) == (engine, index, a, b) for d in self.differences):
            return
        distance = None if a < 0 or b < 0 else gap([*prompt, *ours[:index]], [a, b])
        self.differences.append(Difference(engine, index, a, b, distance, tie))

    def to_dict(self) -> dict[str, Any]:
        return {
            "hashes": self.hashes,
            "compared": dict(self.compared),
            "equal": dict(self.equal),
            "differences": [d.to_dict() for d in self.differences],
            "remarks": self.remarks,
        }


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    if list(a) == list(b):
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def loop_period(tokens: Sequence[int]) -> int | None:
    """The period with which an answer's second half repeats itself; None where it does not or is too short."""
    tail = list(tokens[len(tokens) // 2 :])
    for period in range(1, MAX_LOOP + 1):
        if len(tail) >= 3 * period + 2 and all(tail[i] == tail[i - period] for i in range(period, len(tail))):
            return period
    return None
