"""python -m tests.long.mutate_kernels [--op X] [--sample N] [--part I/N] [--jobs J] [--record FILE] [--fresh]

Is every wrong noticed? Makes every mutant (mutants.py), runs it in the simulator (try_mutant.py), prints a table and
the survivors. Fails under 95 %, on a survivor that survivors.toml does not explain, on an explanation that explains
nothing any more, and before all that where a kernel as it is gets noticed.

The whole takes hours of processor time. So outcomes are kept in mutants.txt, each under a digest of its mutant and of
the kernels it was tried in: a run tries what is not there, and a changed kernel has its own mutants tried anew. After a
change of the simulator or of an op's cases: --fresh.
"""

import argparse
import functools
import hashlib
import os
import sys
import tempfile
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import mlxrt  # noqa: F401  before MLX
from mlxrt.cache.files import atomic_write
from mlxrt.kernels import OPS

from ..support.kernels.mutants import RULES, Mutant, mutants, pieces, together
from ..support.kernels.try_mutant import REFUSED, SURVIVED, alarms, hunt
from ..support.kernels.workers import each

EXPLAINED = Path(__file__).with_name("survivors.toml")
RECORD = Path(__file__).with_name("mutants.txt")
WANTED = 0.95
KINDS = list(dict.fromkeys(kind for kind, _ in RULES))


@dataclass(frozen=True)
class Result:
    mutant: Mutant
    by: str


def explanations() -> dict[str, str]:
    found = tomllib.loads(EXPLAINED.read_text(encoding="utf-8"))
    return {label: entry["reason"] for entry in found.get("survivor", []) for label in entry["mutants"]}


@functools.cache
def make_mutants() -> tuple[Mutant, ...]:
    return tuple(together([m for piece in pieces() for m in mutants(piece)]))


def all_mutants(op: str | None = None) -> list[Mutant]:
    return [m for m in make_mutants() if op is None or op in m.users]


def draw_sample(made: list[Mutant], n: int, seed: int) -> list[Mutant]:
    """n mutants at random. A changed kernel changes its own share of them alone: a record still has the others."""
    return sorted(made, key=lambda mutant: hashlib.sha256(f"{seed} {mutant.key}".encode()).digest())[:n]


@functools.cache
def kernel_digest(op: str) -> str:
    texts = [text for source in OPS[op].sources for text in (source.name, source.helpers, source.body)]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]


def record_key(mutant: Mutant) -> str:
    """The mutant and the kernels it was tried in: an outcome holds no longer than their text stays."""
    text = " ".join([*map(kernel_digest, mutant.users), mutant.key])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def try_one(mutant: Mutant) -> str:
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        return hunt(mutant, Path(folder))


def try_whole(op: str) -> list[str]:
    with tempfile.TemporaryDirectory(prefix="whole-") as folder:
        return alarms(op, Path(folder))


def find_problems(results: list[Result], known: dict[str, str], made: set[str], whole: bool) -> list[str]:
    """What is wrong with the outcome. `known`: explained survivors; `made`: all there are; `whole`: all were tried."""
    survived = {r.mutant.label for r in results if r.by == SURVIVED}
    tried = sum(r.by != REFUSED for r in results)
    caught = tried - sum(r.by == SURVIVED for r in results)
    found = [f"not explained: {label}" for label in sorted(survived - known.keys())]
    found += [f"explains no mutant there is: {label}" for label in sorted(known.keys() - made)]
    if whole:
        found += [f"explains one that is caught: {label}" for label in sorted((known.keys() & made) - survived)]
    if tried and caught < WANTED * tried:
        found.append(f"{caught} of {tried} noticed, {WANTED:.0%} wanted")
    return found


def table(results: list[Result]) -> list[str]:
    lines = [f"{'piece':<26}{'kind':<9}{'made':>5}{'no C++':>7}{'found':>7}{'numbers':>8}{'survived':>9}"]
    for piece in dict.fromkeys(r.mutant.pieces[0] for r in results):
        for kind in KINDS:
            count = Counter(r.by for r in results if r.mutant.pieces[0] == piece and r.mutant.kind == kind)
            if made := count.total():
                checks = made - count[REFUSED] - count["numbers"] - count[SURVIVED]
                counts = f"{made:>5}{count[REFUSED]:>7}{checks:>7}{count['numbers']:>8}{count[SURVIVED]:>9}"
                lines.append(f"{piece.name[:25]:<26}{kind:<9}{counts}")
    return lines


def read_record(record: Path) -> dict[str, str]:
    """What noticed each mutant tried so far, by its record_key."""
    lines = record.read_text(encoding="utf-8").splitlines() if record.exists() else []
    return dict(line.split(" ", 1) for line in lines)  # type: ignore[misc]


def tidy_record(record: Path, made: set[str]) -> None:
    """Without outcomes of mutants that are no more, in an order of its own."""
    lines = sorted(f"{key} {by}\n" for key, by in read_record(record).items() if key in made)
    with atomic_write(record, mode=0o644) as file:
        file.write("".join(lines).encode())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.long.mutate_kernels", description=__doc__)
    parser.add_argument("--op", choices=tuple(OPS), help="only pieces that this op's kernels hold")
    parser.add_argument("--sample", type=int, metavar="N", help="only N mutants, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", metavar="I/N", default="1/1", help="every N-th, from the I-th on")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--record", type=Path, metavar="FILE", default=RECORD, help="where outcomes are kept")
    parser.add_argument("--fresh", action="store_true", help="try again what is there")
    args = parser.parse_args(argv)
    first, step = map(int, args.part.split("/"))
    chosen = all_mutants(args.op)[first - 1 :: step]
    if args.sample is not None:
        chosen = draw_sample(chosen, args.sample, args.seed)
    known = {} if args.fresh else read_record(args.record)
    results = [Result(mutant, known[record_key(mutant)]) for mutant in chosen if record_key(mutant) in known]
    explained = explanations()
    # Survivors take longest, for every case is tried: a run that is cut short has all others.
    todo = sorted((m for m in chosen if record_key(m) not in known), key=lambda mutant: mutant.label in explained)
    used = sorted({name for mutant in todo for name in mutant.users})
    if false := [line for _, lines in each(try_whole, used, args.jobs) for line in lines]:
        print("\n".join(f"noticed without any change: {line}" for line in false))
        return 1
    for mutant, by in each(try_one, todo, args.jobs):
        results.append(Result(mutant, by))
        with args.record.open("a", encoding="utf-8") as file:
            file.write(f"{record_key(mutant)} {by}\n")
        if by == SURVIVED or len(results) % 50 == 0:
            print(f"{len(results)} of {len(chosen)}, {by}: {mutant.label}", flush=True)
    whole = args.op is None and len(chosen) == len(all_mutants())
    tidy_record(args.record, {record_key(m) for m in all_mutants()})
    wrong = find_problems(results, explained, {m.label for m in all_mutants()}, whole)
    tried = sum(r.by != REFUSED for r in results)
    left = sum(r.by == SURVIVED for r in results)
    print("\n".join(table(results)))
    print(
        f"{tried} mutants that compile, {tried - left} noticed ({(tried - left) / max(tried, 1):.1%}), {left} survived"
    )
    print("\n".join(wrong) or "every survivor is explained")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
