"""Processes that used an engine end with their own exit code, on several Pythons: python -m tests.long.check_exits.

    python -m tests.long.check_exits [--python 3.11 3.12 3.13] [--runs 3] [--real-runs 1]

Each way to end of tests/support/exit_programs.py is run in fresh processes, with a toy model and with SmolLM2. uv
brings the Pythons and installs the package's dependencies for each, once; a path to an interpreter is taken as it is.
A wrong exit code, an abort or a line on stderr of a program that ends well fails the run.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

from mlxrt.weights.source.alias import ALIASES, fetch_alias
from mlxrt.weights.source.cache_dir import cache_root
from tests.support.exit_programs import ENDINGS, REAL_MODEL, find_fault

ROOT = Path(__file__).resolve().parents[2]


def prepare_python(version: str) -> Path:
    """An interpreter of this version that has the package's dependencies; the package itself is this tree."""
    if Path(version).is_file():
        return Path(version)
    folder = cache_root() / "test-pythons" / version
    python, installed = folder / "bin" / "python", folder / ".installed"
    if not installed.exists():
        subprocess.run(["uv", "venv", "--quiet", "--clear", "--python", version, "--seed", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--editable", f"{ROOT}[cpu]"], check=True)
        installed.touch()
    return python


def run_program(python: Path, way: str, model: str | None) -> str:
    """What is wrong with the end of one process; empty when nothing is."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | ({REAL_MODEL: model} if model else {})
    command = [python, "-m", "tests.support.exit_programs", way]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, timeout=300, check=False)
    return find_fault(way, done.returncode, done.stderr)


def check_python(python: Path, runs: int, real_runs: int) -> bool:
    version = subprocess.run([python, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    for name, model, times in (("a toy model", None, runs), ("SmolLM2", "smollm2", real_runs)):
        wrong: Counter = Counter()
        for way in ENDINGS:
            for _ in range(times):
                if fault := run_program(python, way, model):
                    wrong[way] += 1
                    print(f"{version}, {name}, {way}: {fault}", flush=True)
        count = times * len(ENDINGS)
        print(f"{version}, {name}: {count - wrong.total()} of {count} processes ended as they should", flush=True)
        if wrong:
            return False
    return True


def run() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", nargs="+", default=["3.11", "3.12", "3.13"], help="versions or paths")
    parser.add_argument("--runs", type=int, default=3, help="processes for each way to end, with a toy model")
    parser.add_argument("--real-runs", type=int, default=1, help="the same with SmolLM2")
    args = parser.parse_args()
    if args.real_runs:
        fetch_alias(ALIASES["smollm2"], offline=False, verify=False)
    pythons = args.python
    if shutil.which("uv") is None and not all(Path(python).is_file() for python in pythons):
        print(f"uv is not installed: only {sys.executable} is tried")
        pythons = [sys.executable]
    fine = [check_python(prepare_python(python), args.runs, args.real_runs) for python in pythons]
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(run())
