"""Thousands of random loads: every token equals a run alone, every request ends once, nothing waits beyond its bound.

    python -m tests.long.scheduler --programs 2000 --seed 1 [--kinds full,gemma] [--processes 2] [--poison]
    python -m tests.long.scheduler --replay SEED KIND

With --poison, memory that nobody owns is NaN, some requests overflow, and half of the programs run in float16; all of
them with --dtype float16, none with --dtype float32.

Prints how often each thing happened. Exit code 1 on a difference, with the program and its numbers for --replay, or
when something never happened: such a run has shown nothing about it.
"""

import argparse
import os
import sys
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

SHARE = 20  # programs in one piece of work
EVENTS = (
    "tokens compared", "tokens drawn or penalised", "log probabilities compared", "waits with prompts between",
    "cancels of running requests", "cancels of waiting requests", "ended by stop", "ended by length",
    "ended by cancelled", "ended by deadline", "preempted requests", "evictions", "hits", "compiled programs",
    "requests that waited for a prefix", "prompts refused",
)  # fmt: skip


POISON_EVENTS = ("requests that overflowed", "others beside poisoned memory", "blocks poisoned")


def work(kind: str, first: int, count: int) -> tuple[Counter, str]:
    """Some programs of a kind; what was seen, and the first failure in words."""
    from mlxrt.errors import MlxrtError
    from tests.support.state_machine.checker import Checker

    from ..support.scheduler_load.play import Play
    from ..support.scheduler_load.program import make

    tally: Counter = Counter()
    checker = Checker(kind, tally)
    for seed in range(first, first + count):
        program = make(seed, kind)
        try:
            Play(program, checker).run()
        except (AssertionError, MlxrtError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError) as e:
            where = "".join(traceback.format_exception(e)[-3:])
            return tally, f"{program}\n{where}\nagain: python -m tests.long.scheduler --replay {seed} {kind}"
    return tally, ""


def parse(kinds: tuple[str, ...]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", type=lambda text: tuple(text.split(",")), default=kinds)
    parser.add_argument("--processes", type=int, default=min(4, os.cpu_count() or 1))
    parser.add_argument("--poison", action="store_true", help="NaN in memory nobody owns, and requests that overflow")
    parser.add_argument("--replay", nargs=2, metavar=("SEED", "KIND"))
    parser.add_argument("--dtype", choices=("float32", "float16"), help="with --poison; both without it")
    options = parser.parse_args()
    if options.dtype and not options.poison:
        parser.error("--dtype needs --poison: other programs run in float32")
    if unknown := set(options.kinds) - set(kinds):
        parser.error(f"no kind {', '.join(sorted(unknown))}; there are {', '.join(kinds)}")
    if options.programs < 1 or options.processes < 1:
        parser.error("--programs and --processes must be 1 or more")
    return options


def run_all(options: argparse.Namespace) -> tuple[Counter, str]:
    from tests.support.state_machine.kinds import poison_kinds

    tally: Counter = Counter()
    failure, began = "", time.monotonic()
    kinds = poison_kinds(options.kinds, options.dtype) if options.poison else options.kinds
    share = min(SHARE, max(1, options.programs // len(kinds)))  # every kind has its turn
    pieces = [
        (kinds[i % len(kinds)], options.seed * 1_000_003 + first, min(share, options.programs - first))
        for i, first in enumerate(range(0, options.programs, share))
    ]
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(work, *piece) for piece in pieces]):
            counts, failure = done.result()
            tally.update(counts)
            progress = f"{tally['programs']} of {options.programs} programs, {time.monotonic() - began:.0f} s"
            print(progress, end="\r" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)
            if failure:
                pool.shutdown(wait=False, cancel_futures=True)
                break
    return tally, failure


def main() -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the processes share the cores; inherited by them
    from tests.support.state_machine.kinds import KINDS

    options = parse(KINDS)
    if options.replay:
        _, failure = work(options.replay[1], int(options.replay[0]), 1)
        print(failure or "it passes")
        return bool(failure)
    tally, failure = run_all(options)
    if failure:
        print(f"A DIFFERENCE (seed {options.seed}):\n{failure}")
        return 1
    for name, n in sorted(tally.items()):
        print(f"{n:9d}  {name}")
    missing = [event for event in (*EVENTS, *(POISON_EVENTS if options.poison else ())) if not tally[event]]
    print(
        f"{tally['programs']} programs, {tally['requests']} requests, {tally['tokens compared']} tokens compared, "
        f"{tally['waits judged']} waits judged, {tally['ties']} ties ({tally['ties in float16']} in float16), "
        "0 differences"
    )
    if missing:
        print(f"never happened: {', '.join(missing)}; run more programs")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
