"""How long a person waits: `import`, and from the shell to the first character of an answer. Fresh processes."""

import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxrt.errors import MlxrtError

from .stats import Ratio, median_ratio
from .workers import ROOT

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
        return median_ratio(self.theirs, self.ours)

    @property
    def passed(self) -> bool:
        return self.target is None or self.ratio.median >= self.target

    def __str__(self) -> str:
        a, b = statistics.median(self.ours), statistics.median(self.theirs)
        aim = f"(target {self.target:g})" if self.target else "(not judged)"
        return f"{self.what:34}{a:8.3f} s{b:10.3f} s   {self.ratio} times faster  {aim}"

    def to_dict(self) -> dict[str, Any]:
        return vars(self) | {"ratio": vars(self.ratio)}


def import_seconds(statement: str) -> float:
    program = f"import time; t = time.perf_counter(); {statement}; print(time.perf_counter() - t)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode != 0:
        raise MlxrtError(f"`{statement}` failed: {(done.stderr.splitlines() or ['no reason given'])[-1]}")
    return float(done.stdout)


def first_character(command: list[str], env: dict[str, str]) -> float:
    """Seconds until a piped command's answer begins. mlx_lm.generate draws a line of = before it: not an answer."""
    start = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, env={**os.environ, **env}
    ) as process:
        assert process.stdout and process.stderr
        while seen := os.read(process.stdout.fileno(), 4096):
            if seen.strip(b"=\r\n"):
                took = time.perf_counter() - start
                process.terminate()
                return took
        said = process.stderr.read().decode(errors="replace").strip().splitlines()
    raise MlxrtError(f"{' '.join(command[:5])} gave no answer: {(said or ['and no reason'])[-1]}")


def alternate(rounds: int, ours: Any, theirs: Any) -> tuple[list[float], list[float]]:
    """Both in turns, after one of each that does not count (bytecode, file cache)."""
    ours(), theirs()
    pairs = [(ours(), theirs()) for _ in range(rounds)]
    return [a for a, _ in pairs], [b for _, b in pairs]


def measure_import(rounds: int) -> Waits:
    found = alternate(rounds, lambda: import_seconds("import mlxrt"), lambda: import_seconds("import mlx_lm"))
    return Waits("import mlxrt / import mlx_lm", *found, IMPORT_TARGET)


def measure_load_import(rounds: int) -> Waits:
    """mlxrt's names are loaded when they are first used, so this is what a program that loads a model waits for."""
    ours, theirs = "from mlxrt import load", "from mlx_lm import load"
    found = alternate(rounds, lambda: import_seconds(ours), lambda: import_seconds(theirs))
    return Waits("from mlxrt / mlx_lm import load", *found, None)


def preload(library: str) -> dict[str, str]:
    """Libraries out of wheels find their neighbours only with their folder on the path."""
    return {"LD_PRELOAD": library, "LD_LIBRARY_PATH": str(Path(library).parent)}


def measure_shell(folder: Path, rounds: int, same_blas: str | None) -> Waits:
    """`same_blas`: a library to put under mlx-lm too; None leaves it as it comes."""
    common = ["--model", str(folder), "--prompt", QUESTION, "--max-tokens", "4", "--temp", "0"]
    ours = [sys.executable, "-m", "mlxrt", "generate", *common]
    theirs = [sys.executable, "-m", "mlx_lm", "generate", *common]
    env = {"GOMP_SPINCOUNT": "1000"} | preload(same_blas) if same_blas else {}
    found = alternate(rounds, lambda: first_character(ours, {}), lambda: first_character(theirs, env))
    # Judged is the peer's command as it comes; with our BLAS put under it, it is shown beside.
    name = "shell to first token" + (", same BLAS" if same_blas else "")
    return Waits(name, *found, None if same_blas else SHELL_TARGET)
