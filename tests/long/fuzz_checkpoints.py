"""Damage model files and load them in child processes: every load succeeds or raises a typed error, in one line.

    python -m tests.long.fuzz_checkpoints --count 2000 --seed 1 [--save FOLDER] [--only config.json]

Exit code 0: no other exception, no death, no hang. Inputs that failed are saved with what happened.
"""

import argparse
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file, too

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.support.fuzz.mutate import Case, cases
from tests.support.fuzz.pool import Outcome, Pool, load_all
from tests.support.fuzz.seeds import seed_fixture, seed_folder, seed_gguf

FINE = ("ok", "refused")


def make_seeds() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        seeds = seed_folder(Path(folder))
        seeds |= {f"{arch}.gguf": seed_gguf(Path(folder), arch) for arch in ("llama", "qwen3")}
        return seeds | {f"{arch}.gguf": seed_fixture(Path(folder), arch) for arch in ("gemma3_text", "gpt_oss")}


WHOLE = ("config.json", "llama.gguf", "qwen3.gguf", "gemma3_text.gguf", "gpt_oss.gguf")  # one for each model


def check_seeds(seeds: dict[str, bytes]) -> None:
    """Undamaged files must load: otherwise refusals would prove nothing."""
    whole = [Case(name, seeds[name]) for name in WHOLE]
    for outcome in load_all(seeds, whole, 1):
        if outcome.outcome != "ok":
            raise SystemExit(f"the undamaged {outcome.case.target} is {outcome.outcome}: {outcome.details}")


def fuzz(seeds: dict[str, bytes], count: int, number: int, size: int = 2, only: str | None = None) -> list[Outcome]:
    """Judge `count` different inputs."""
    pool, seen = Pool(seeds, size), set()
    damage = cases(seeds, only)
    quiet = settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )

    def feed(case: Case) -> None:
        if len(seen) < count and case not in seen and case.blob != seeds[case.target]:
            seen.add(case)
            pool.queue.put(case)

    rounds = random.Random(number)
    try:
        while len(seen) < count:  # hypothesis repeats itself now and then: more rounds until the count is there
            seed(rounds.getrandbits(32))(quiet(given(damage)(feed)))()
    finally:
        outcomes = pool.close()
    return outcomes


def save(folder: Path, outcomes: list[Outcome]) -> None:
    for i, outcome in enumerate(outcomes):
        place = folder / f"{i:03}-{outcome.outcome}"
        place.mkdir(parents=True, exist_ok=True)
        (place / outcome.case.target).write_bytes(outcome.case.blob)
        (place / "what.txt").write_text(outcome.details, errors="backslashreplace")


def report(outcomes: list[Outcome]) -> str:
    table = Counter((o.case.target, o.outcome) for o in outcomes)
    lines = [f"{target:32} {outcome:8} {count:6}" for (target, outcome), count in sorted(table.items())]
    total = Counter(o.outcome for o in outcomes)
    return "\n".join([*lines, f"{len(outcomes)} inputs: " + ", ".join(f"{n} {v}" for v, n in sorted(total.items()))])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--save", type=Path, default=Path("fuzz-failures"))
    parser.add_argument("--only", help="one file, like config.json")
    options = parser.parse_args()
    seeds = make_seeds()
    check_seeds(seeds)
    outcomes = fuzz(seeds, options.count, options.seed, options.processes, options.only)
    print(report(outcomes))
    bad = [o for o in outcomes if o.outcome not in FINE]
    if bad:
        save(options.save, bad)
        print(f"{len(bad)} failures saved in {options.save}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
