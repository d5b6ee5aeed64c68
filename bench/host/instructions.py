"""Instruction counts of the hot host paths under valgrind: the same on a busy machine and a quiet one.

    python -m bench.host.instructions [NAME ...] [--count 50]

Each is run COUNT and 2 x COUNT times under cachegrind; the difference is what COUNT calls cost, start-up excluded.
Exit 1 where one could not be counted, 2 where valgrind is not installed.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys

from .work import WORK

# Hashes of strings and addresses vary from run to run, and sets and dicts with them.
STABLE_ENV = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class NotCounted(Exception):
    """A run under valgrind that gave no count."""


def instructions(valgrind: str, name: str, count: int) -> int:
    command = [valgrind, "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"]
    command += [sys.executable, "-m", "bench.host.work", name, str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | STABLE_ENV)
    found = re.search(r"I\s+refs:\s+([\d,]+)", done.stderr)
    if done.returncode != 0 or found is None:
        lines = done.stderr.strip().splitlines() or ["nothing on stderr"]
        raise NotCounted(next((line for line in lines if line.startswith("valgrind: ")), lines[-1]))
    return int(found[1].replace(",", ""))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(WORK)} (default: all)")
    parser.add_argument("--count", type=int, default=50)
    options = parser.parse_args()
    valgrind = os.environ.get("VALGRIND") or shutil.which("valgrind")
    if valgrind is None:
        print("valgrind is not installed; `python -m pytest bench/host` measures by the clock", file=sys.stderr)
        return 2
    if unknown := set(options.names) - set(WORK):
        parser.error(f"unknown host path: {', '.join(sorted(unknown))}; there are {', '.join(WORK)}")
    status = 0
    for name in options.names or WORK:
        try:
            once, twice = (instructions(valgrind, name, n * options.count) for n in (1, 2))
        except NotCounted as reason:  # an old valgrind cannot read every library's debug information
            print(f"{name:16}not counted: {reason}", flush=True)
            status = 1
            continue
        print(f"{name:16}{(twice - once) / options.count:14,.0f} instructions a call", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
