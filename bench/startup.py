"""How long a person waits: `import`, and from the shell to the first character of an answer. Judged against targets."""

import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxrt.bench.launch import first_character, same_blas, statement_seconds
from mlxrt.bench.statistics import Ratio, paired_ratio

IMPORT_TARGET, SHELL_TARGET = 4.0, 2.0
QUESTION = "What is the capital of France? Answer in one sentence."


@dataclass(frozen=True)
class Waits:
    """Seconds of ours and theirs; the ratio says how many times longer theirs takes."""

    what: str
    ours: list[float]
    theirs: list[float]
    target: float | None  # None: shown, not judged

    @property
    def ratio(self) -> Ratio:
        return paired_ratio(self.theirs, self.ours)

    @property
    def passed(self) -> bool:
        return self.target is None or self.ratio.value >= self.target

    def __str__(self) -> str:
        a, b = statistics.median(self.ours), statistics.median(self.theirs)
        aim = f"(target {self.target:g})" if self.target else "(not judged)"
        return f"{self.what:34}{a:8.3f} s{b:10.3f} s   {self.ratio} times faster  {aim}"

    def to_dict(self) -> dict[str, Any]:
        return vars(self) | {"ratio": self.ratio.to_dict()}


def alternate(rounds: int, ours: Any, theirs: Any) -> tuple[list[float], list[float]]:
    """Both in turns, after one of each that does not count (bytecode, file cache)."""
    ours(), theirs()
    pairs = [(ours(), theirs()) for _ in range(rounds)]
    return [a for a, _ in pairs], [b for _, b in pairs]


def measure_import(rounds: int) -> Waits:
    found = alternate(rounds, lambda: statement_seconds("import mlxrt"), lambda: statement_seconds("import mlx_lm"))
    return Waits("import mlxrt / import mlx_lm", *found, IMPORT_TARGET)


def measure_load_import(rounds: int) -> Waits:
    """mlxrt's names are loaded when they are first used, so this is what a program that loads a model waits for."""
    ours, theirs = "from mlxrt import load", "from mlx_lm import load"
    found = alternate(rounds, lambda: statement_seconds(ours), lambda: statement_seconds(theirs))
    return Waits("from mlxrt / mlx_lm import load", *found, None)


def measure_shell(folder: Path, rounds: int, *, same: bool) -> Waits:
    """`same`: with our BLAS put under mlx-lm too; else as it comes."""
    common = ["--model", str(folder), "--prompt", QUESTION, "--max-tokens", "4", "--temp", "0"]
    ours = [sys.executable, "-m", "mlxrt", "generate", *common]
    theirs = [sys.executable, "-m", "mlx_lm", "generate", *common]
    env = same_blas() if same else {}
    found = alternate(rounds, lambda: first_character(ours, {}), lambda: first_character(theirs, env))
    # Judged is the peer's command as it comes; with our BLAS put under it, it is shown beside.
    name = "shell to first token" + (", same BLAS" if same else "")
    return Waits(name, *found, None if same else SHELL_TARGET)
