"""Plants faults in copies of the package, one each, and shows what catches them.

    python -m tests.long.planted_faults [--programs 60] [--only WORDS] [--processes 2]

Each copy runs in a process of its own: first the machine on the kinds where the fault can show, then, if it survives,
the core tests. Exit code 1 if a fault survives both, or no longer fits the source.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from ..support.state_machine.planted import FAULTS, Fault

ROOT = Path.cwd()  # the repository: this is a command of it
CORE = (
    "tests/cache/test_layer_state.py",
    "tests/cache/test_memory.py",
    "tests/engine/test_engine.py",
    "tests/engine/test_session.py",
)
LONGEST = 900  # seconds a child may take: a fault that hangs is caught too


def copy(folder: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__", ".hypothesis")
    for name in ("mlxrt", "tests", "bench"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)


def plant(fault: Fault, folder: Path) -> str:
    """A copy of the package and its tests with the fault in it; what is wrong with the fault itself, if anything."""
    copy(folder)
    path = folder / "mlxrt" / fault.file
    text = path.read_text(encoding="utf-8")
    if (n := text.count(fault.old)) != 1:
        return f"{fault.old!r} is {n} times in {fault.file}: the fault no longer fits the source"
    path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
    return ""


def child(folder: Path, *command: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=LONGEST
    )


def catch(fault: Fault, programs: int) -> tuple[bool, str]:
    """Whether a fault is caught, and by what."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        if wrong := plant(fault, folder):
            return False, wrong
        try:
            done = child(
                folder, "-m", "tests.long.planted_faults", "--hunt", ",".join(fault.kinds), "--programs", str(programs)
            )
        except subprocess.TimeoutExpired:
            return True, "the machine: it hangs"
        if done.returncode < 0:
            return True, f"the machine: the process died of signal {-done.returncode}"
        if done.returncode not in (0, 3):
            return True, f"the machine: it cannot run: {last_line(done.stderr)}"
        found = json.loads(done.stdout.splitlines()[-1])
        if found["failure"]:
            if child(ROOT, "-m", "tests.long.planted_faults", "--replay", json.dumps(found["program"])).returncode:
                return False, f"a false alarm, the program fails without the fault too: {last_line(found['failure'])}"
            return True, f"the machine, program {found['programs'] + 1} ({found['failure'].splitlines()[-1][:110]})"
        failed = core_tests(folder)
        return bool(failed), failed or "NOTHING"


def core_tests(folder: Path) -> str:
    """The first of them that fails there; nothing if all pass."""
    tests = child(folder, "-m", "pytest", "-x", "-p", "no:cacheprovider", *CORE)
    failed = [line for line in tests.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0][:130] if failed else "" if tests.returncode == 0 else last_line(tests.stdout)


def false_alarm() -> str:
    """A test that fails without any fault: it would catch every one."""
    with tempfile.TemporaryDirectory() as name:
        copy(Path(name).resolve())
        return core_tests(Path(name).resolve())


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no word"])[-1][:110]


def hunt_here(kinds: str, programs: int) -> int:
    """In the child: run the machine on the package that lies here and say what was found."""
    import mlxrt

    from ..support.state_machine.shrink import hunt

    if not Path(mlxrt.__file__).resolve().is_relative_to(Path.cwd().resolve()):
        raise SystemExit(f"this is not the copy with the fault: {mlxrt.__file__}")
    found = hunt(tuple(kinds.split(",")), programs, 1, shrink=False)
    program = asdict(found.program) if found.program else None
    print(json.dumps({"failure": found.failure, "programs": found.tally["programs"], "program": program}))
    return 3 if found.failure else 0


def replay(text: str) -> int:
    """In a child: run one program on the package as it is. It must pass."""
    from ..support.state_machine.program import Program
    from ..support.state_machine.shrink import Court, try_program

    fields = json.loads(text)
    try_program(Program(**fields | {"ops": tuple(tuple(op) for op in fields["ops"])}), Court(Counter()))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=60, help="programs a fault has to survive")
    parser.add_argument("--only", default="", help="faults whose name has these words")
    parser.add_argument("--processes", type=int, default=min(4, os.cpu_count() or 1))
    parser.add_argument("--hunt", help=argparse.SUPPRESS)
    parser.add_argument("--replay", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.hunt:
        return hunt_here(options.hunt, options.programs)
    if options.replay:
        return replay(options.replay)
    chosen = [f for f in FAULTS if options.only in f.name]
    if not chosen:
        parser.error(f"no fault has {options.only!r} in its name")
    if alarm := false_alarm():
        print(f"caught without any fault: {alarm}")
        return 1
    survived = 0
    with ThreadPoolExecutor(options.processes) as pool:
        for fault, (caught, by) in zip(chosen, pool.map(lambda f: catch(f, options.programs), chosen)):
            survived += not caught
            print(f"{'caught  ' if caught else 'SURVIVED'}  {fault.name:42}  {by}", flush=True)
    print(f"{len(chosen) - survived} of {len(chosen)} faults caught")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
