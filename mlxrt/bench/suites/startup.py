"""Start-up of fresh processes, interleaved: `import`, loading a model, and from the shell to the first character."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from ... import _openblas
from ..backend import BackendFailed, environment
from ..bench_model import mlx_lm_setting
from ..comparison import Comparison, Options
from ..interleave import Reply
from ..result import OURS, Figure
from . import Case

Timers = dict[str, Callable[[], float]]  # by engine: the seconds one fresh process takes

QUESTION = "What is the capital of France? Answer in one sentence."


def cases(options: Options) -> list[Case]:
    ways = {"import": time_import, "import and load": time_load, "shell to first token": time_shell}
    return [Case("startup", name, partial(run, name=name, make_timers=way)) for name, way in ways.items()]


def run(comparison: Comparison, name: str, make_timers: Callable[[Comparison], Timers]) -> Iterator[Figure]:
    timers = make_timers(comparison)
    if not timers:
        return
    engines = {engine: partial(run_timer, timer) for engine, timer in timers.items()}
    rounds = comparison.interleave(f"startup, {name}").run(engines, [seconds])
    yield comparison.figure("startup", name, "wait", "s", rounds.values(seconds), higher=False)


def run_timer(timer: Callable[[], float], r: int) -> Reply:
    """The warm-up round is not counted: it fills bytecode and file caches."""
    return {"seconds": timer()}


def seconds(reply: Reply) -> float:
    return reply["seconds"]


def time_import(comparison: Comparison) -> Timers:
    statements = {OURS: "import mlxrt", "mlx-lm": "import mlx_lm", "llama.cpp": "import xllamacpp"}
    return {name: partial(statement_seconds, s) for name, s in statements.items() if name in comparison.backends}


def time_load(comparison: Comparison) -> Timers:
    name = comparison.model.resolved.name
    timers: Timers = {OURS: partial(statement_seconds, f"import mlxrt; mlxrt.load({name!r})")}
    folder = mlx_lm_setting(comparison.model.resolved).get("folder")
    if "mlx-lm" in comparison.backends and folder and comparison.ours.info["tokenizer"]:
        timers["mlx-lm"] = partial(statement_seconds, f"from mlx_lm import load; load({folder!r})")
    return timers


def time_shell(comparison: Comparison) -> Timers:
    """Only for models with a tokenizer; mlx-lm gets our BLAS."""
    if not comparison.ours.info["tokenizer"]:
        return {}
    common = ["--prompt", QUESTION, "--max-tokens", "4", "--temp", "0", "--model"]
    ours = [sys.executable, "-m", "mlxrt", "generate", *common, comparison.model.resolved.name]
    timers: Timers = {OURS: partial(first_character_seconds, ours, {})}
    folder = mlx_lm_setting(comparison.model.resolved).get("folder")
    if "mlx-lm" in comparison.backends and folder:
        theirs = [sys.executable, "-m", "mlx_lm", "generate", *common, folder]
        timers["mlx-lm"] = partial(first_character_seconds, theirs, our_blas())
    return timers


def statement_seconds(statement: str) -> float:
    """Seconds a fresh interpreter takes for a statement, without its own start."""
    program = f"import time; t = time.perf_counter(); {statement}; print('took', time.perf_counter() - t)"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=environment({}), check=False)
    if done.returncode != 0:
        raise BackendFailed(f"`{statement}` failed: {(done.stderr.splitlines() or ['no reason given'])[-1]}")
    return float(done.stdout.split()[-1])


def first_character_seconds(command: list[str], env: dict[str, str]) -> float:
    """Seconds until a command's answer begins. The line of = that mlx_lm.generate prints first does not count."""
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(env)) as process:
        assert process.stdout and process.stderr
        while output := os.read(process.stdout.fileno(), 4096):
            if output.strip(b"=\r\n"):
                spent = time.perf_counter() - start
                process.terminate()
                return spent
        errors = process.stderr.read().decode(errors="replace").strip().splitlines()
    raise BackendFailed(f"{' '.join(command[:5])} gave no answer: {(errors or ['nothing on stderr'])[-1]}")


def our_blas() -> dict[str, str]:
    """Environment that puts mlxrt's BLAS under another program; empty where MLX brings its own."""
    found = re.search(r"\((/.*)\)$", _openblas.running())
    if found is None or not sys.platform.startswith("linux"):
        return {}
    # Libraries out of wheels find their neighbours only with their folder on the path.
    return {"LD_PRELOAD": found[1], "LD_LIBRARY_PATH": str(Path(found[1]).parent), "GOMP_SPINCOUNT": "1000"}
