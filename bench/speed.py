"""Prefill and decode of mlxrt and mlx-lm on the same folder, in turns, one process each."""

import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxrt.bench.side import Side
from mlxrt.bench.statistics import Ratio, paired_ratio
from mlxrt.bench.tokens import first_difference

PROMPTS = (128, 512)
DECODED = 64
FLOOR = 0.97  # of mlx-lm's speed; the interval may not reach below


@dataclass
class Row:
    """All rounds of one prompt length."""

    prompt: int
    prefill: dict[str, list[float]] = field(default_factory=lambda: {"mlxrt": [], "mlx-lm": []})  # tokens per second
    decode: dict[str, list[float]] = field(default_factory=lambda: {"mlxrt": [], "mlx-lm": []})
    differences: list[str] = field(default_factory=list)
    rounds: int = 0

    def ratio(self, what: str) -> Ratio:
        rates = self.prefill if what == "prefill" else self.decode
        return paired_ratio(rates["mlxrt"], rates["mlx-lm"])

    def to_dict(self) -> dict[str, Any]:
        figures = {what: self.ratio(what).to_dict() for what in ("prefill", "decode")}
        raw = {"prefill_tps": self.prefill, "decode_tps": self.decode, "differences": self.differences}
        return {"prompt": self.prompt, "rounds": self.rounds, "ratio": figures, **raw}


def rates(result: dict[str, Any], prompt: int) -> tuple[float, float]:
    """Prefill to the first token; decode between the first and the last."""
    at = result["at"]
    return prompt / at[0], (len(at) - 1) / (at[-1] - at[0])


def told_difference(ours: Side, prompt: list[int], a: list[int], b: list[int]) -> str | None:
    i = first_difference(a, b)
    if i is None:
        return None
    gap = ours.ask(do="gap", prompt=[*prompt, *a[:i]], pair=[a[i], b[i]])
    return f"token {i}: mlxrt {a[i]}, mlx-lm {b[i]}, {gap:.2e} apart in our logits"


def measure(folder: Path, texts: list[int], rounds: int, decoded: int = DECODED) -> tuple[list[Row], str]:
    """Every round takes another stretch of the text; who goes first changes from round to round."""
    rows = [Row(n) for n in PROMPTS]
    ours_side = Side("mlxrt", {"model": str(folder)}, program="mlxrt.bench.sides.ours")
    with ours_side as ours, Side("mlx-lm", {"folder": str(folder)}) as theirs:
        sides = {"mlxrt": ours, "mlx-lm": theirs}
        libraries = {side.told["blas"] for side in sides.values()}
        for r in range(-1, rounds):  # round -1 warms both up
            for row in rows:
                start = (r + 1) * max(PROMPTS)
                prompt = texts[start : start + row.prompt]
                order = list(sides) if r % 2 else list(reversed(sides))
                got = {name: sides[name].ask(do="generate", prompt=prompt, max_tokens=decoded) for name in order}
                if r >= 0:
                    add(row, got, ours, prompt)
    return rows, " / ".join(sorted(libraries))


def add(row: Row, got: dict[str, Any], ours: Side, prompt: list[int]) -> None:
    row.rounds += 1
    for name, result in got.items():
        prefill, decode = rates(result, row.prompt)
        row.prefill[name].append(prefill)
        row.decode[name].append(decode)
    if found := told_difference(ours, prompt, got["mlxrt"]["tokens"], got["mlx-lm"]["tokens"]):
        row.differences.append(f"round {row.rounds}, {found}")


def measure_default(folder: Path, texts: list[int], prompt: int = 8, decoded: int = 4) -> dict[str, float]:
    """mlx-lm as it comes: reference BLAS, packed weights. Few tokens: it takes seconds for each."""
    with Side("mlx-lm", {"folder": str(folder)}, env={"MLXRT_BLAS": "off"}) as side:
        side.ask(do="generate", prompt=texts[:2], max_tokens=1)
        prefill, decode = rates(side.ask(do="generate", prompt=texts[:prompt], max_tokens=decoded), prompt)
    return {"prefill_tps": prefill, "decode_tps": decode, "prompt": prompt, "decoded": decoded}


def lines(rows: list[Row]) -> list[str]:
    shown = [f"{'':22}{'mlxrt':>10}{'mlx-lm':>10}   ratio, 95 % interval"]
    for row in rows:
        for what in ("prefill", "decode"):
            rate = row.prefill if what == "prefill" else row.decode
            a, b = (statistics.median(rate[name]) for name in ("mlxrt", "mlx-lm"))
            name = f"{what}, prompt {row.prompt}"
            shown.append(f"{name:22}{a:10.2f}{b:10.2f}   {row.ratio(what)}  (floor {FLOOR})")
        equal = row.rounds - len(row.differences)
        shown.append(f"  same tokens in {equal} of {row.rounds} rounds" + "".join(f"; {d}" for d in row.differences))
    return shown


def passed(rows: list[Row]) -> bool:
    return all(row.ratio(what).low >= FLOOR for row in rows for what in ("prefill", "decode"))
