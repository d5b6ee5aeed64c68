"""Thousands of random programs, every token compared with recomputation.

    python -m tests.long.state_machine --programs 3000 --seed 1 [--kinds full,gemma] [--processes 2] [--poison]

With --poison, memory that nobody owns is NaN, some requests overflow, and half of the programs run in float16; all of
them with --dtype float16, none with --dtype float32.

Prints what was compared and how often each event happened. Exit code 1 on a difference (with the shrunk program), or
when an event never happened: such a run has shown nothing about it.
"""

import argparse
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

SHARE = 20  # programs in one piece of work
POISON_EVENTS = ("requests that overflowed", "scores that overflowed", "blocks poisoned")


def work(kind: str, count: int, seed: int) -> tuple[Counter, list[str], str]:
    from ..support.state_machine.shrink import hunt

    found = hunt((kind,), count, seed)
    return found.tally, found.ties, found.failure


def parse(kinds: tuple[str, ...]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", type=lambda text: tuple(text.split(",")), default=kinds)
    parser.add_argument("--processes", type=int, default=min(4, os.cpu_count() or 1))
    parser.add_argument("--poison", action="store_true", help="NaN in memory nobody owns, and requests that overflow")
    parser.add_argument("--dtype", choices=("float32", "float16"), help="with --poison; both without it")
    options = parser.parse_args()
    if options.dtype and not options.poison:
        parser.error("--dtype needs --poison: other programs run in float32")
    if unknown := set(options.kinds) - set(kinds):
        parser.error(f"no kind {', '.join(sorted(unknown))}; there are {', '.join(kinds)}")
    if options.programs < 1 or options.processes < 1:
        parser.error("--programs and --processes must be 1 or more")
    return options


def shares(options: argparse.Namespace) -> list[tuple[str, int, int]]:
    """(kind, programs, seed) of each piece of work, the kinds in turn."""
    from ..support.state_machine.kinds import poison_kinds

    kinds = poison_kinds(options.kinds, options.dtype) if options.poison else options.kinds
    share = min(SHARE, max(1, options.programs // len(kinds)))  # every kind has its turn
    pieces: list[tuple[str, int, int]] = []
    left = options.programs
    while left > 0:
        kind = kinds[len(pieces) % len(kinds)]
        pieces.append((kind, min(share, left), options.seed * 1_000_003 + len(pieces)))
        left -= share
    return pieces


def progress(tally: Counter, total: int, began: float) -> None:
    line = (
        f"{tally['programs']} of {total} programs, {tally['tokens compared']} tokens, {time.monotonic() - began:.0f} s"
    )
    print(line, end="\r" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)


def run_all(options: argparse.Namespace) -> tuple[Counter, list[str], str]:
    tally: Counter = Counter()
    ties: list[str] = []
    failure, began = "", time.monotonic()
    pool = ProcessPoolExecutor(options.processes, mp_context=get_context("spawn"))
    with pool:
        waiting = [pool.submit(work, *piece) for piece in shares(options)]
        for done in as_completed(waiting):
            counts, more, failure = done.result()
            tally.update(counts)
            ties += more
            progress(tally, options.programs, began)
            if failure:
                pool.shutdown(wait=False, cancel_futures=True)
                break
    return tally, ties, failure


def main() -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the processes share the cores; inherited by them
    from ..support.state_machine.kinds import KINDS
    from ..support.state_machine.shrink import EVENTS

    options = parse(KINDS)
    tally, ties, failure = run_all(options)
    print("\n".join(ties))
    if failure:
        print(f"A DIFFERENCE (seed {options.seed}), shrunk to:\n{failure}")
        return 1
    for name, n in sorted(tally.items()):
        print(f"{n:9d}  {name}")
    missing = [event for event in (*EVENTS, *(POISON_EVENTS if options.poison else ())) if not tally[event]]
    print(
        f"{tally['programs']} programs, {tally['tokens compared']} tokens compared, {tally['ties']} ties "
        f"({tally['ties in float16']} in float16), 0 differences"
    )
    if missing:
        print(f"never happened: {', '.join(missing)}; run more programs")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
