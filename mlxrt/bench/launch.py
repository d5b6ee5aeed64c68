"""How long a person waits for a fresh process: `import`, a load, the first character of an answer. Knows no engine."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

from .. import _openblas as blas
from .side import SideFailed, environment


def statement_seconds(statement: str, env: dict[str, str] | None = None) -> float:
    """A fresh interpreter runs it; its own start does not count."""
    program = f"import time; t = time.perf_counter(); {statement}; print('took', time.perf_counter() - t)"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(env or {}), check=False)
    if done.returncode != 0:
        raise SideFailed(f"`{statement}` failed: {(done.stderr.splitlines() or ['no reason given'])[-1]}")
    return float(done.stdout.split()[-1])


def first_character(command: list[str], env: dict[str, str]) -> float:
    """Seconds until a piped command's answer begins. mlx_lm.generate draws a line of = before it: not an answer."""
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(env)) as process:
        assert process.stdout and process.stderr
        while seen := os.read(process.stdout.fileno(), 4096):
            if seen.strip(b"=\r\n"):
                took = time.perf_counter() - start
                process.terminate()
                return took
        said = process.stderr.read().decode(errors="replace").strip().splitlines()
    raise SideFailed(f"{' '.join(command[:5])} gave no answer: {(said or ['and no reason'])[-1]}")


def same_blas() -> dict[str, str]:
    """What puts mlxrt's BLAS under another program too; nothing where MLX brings its own."""
    found = re.search(r"\((/.*)\)$", blas.running())
    if found is None or not sys.platform.startswith("linux"):
        return {}
    # Libraries out of wheels find their neighbours only with their folder on the path.
    return {"LD_PRELOAD": found[1], "LD_LIBRARY_PATH": str(Path(found[1]).parent), "GOMP_SPINCOUNT": "1000"}
