"""Damage checkpoints and load them in a child process: a typed error in one line, or the right answer; never another.

    python -m tests.long.fuzz_jang --count 1000 [--seed N] [--save FOLDER]

Exit code 0: no traceback, crash or hang, and no checkpoint that loads although it must not or gives wrong logits.
"""

import argparse
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np

from tests.support.fuzz.child import limit_memory
from tests.support.fuzz.pool import Child

from ..weights.jang.float_model import close
from ..weights.jang.mutations import Damage, damaged, sound

TOKENS = np.random.default_rng(9).integers(0, 96, 12).tolist()
LIMIT, SECONDS = 1e-4, 60
FRESH = 100  # checkpoints a child loads, twice each: MLX keeps a thread for every stream an engine made


def serve(pipe, log: str) -> None:
    """Answer folders with (outcome, details) and leave logits.npy in them, until the pipe closes."""
    import os
    import traceback

    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    limit_memory()
    import mlxrt

    pipe.send(("ready", ""))
    while True:
        try:
            folder = Path(pipe.recv())
        except EOFError:
            return
        try:
            pipe.send(answer(mlxrt, folder))
        except BaseException:  # what is not ours is the failure that is looked for
            pipe.send(("failed", traceback.format_exc()[-3000:]))


def answer(mlxrt, folder: Path) -> tuple[str, str]:
    outcomes = set()
    for unpack in (False, True):
        try:
            config = mlxrt.EngineConfig(dequantise=unpack, kv_memory="64M")
            with mlxrt.load(str(folder), config) as engine:
                np.save(folder / f"logits{int(unpack)}.npy", np.array(engine.score(TOKENS)))
            outcomes.add("ok")
        except mlxrt.MlxrtError as error:
            line = str(error)
            if not line.strip() or "\n" in line or len(line) > 2000:
                return "failed", f"{type(error).__name__} is not one line: {line[:2000]!r}"
            outcomes.add("refused")
    return (
        ("failed", "packed and unpacked do not agree on whether it loads")
        if len(outcomes) > 1
        else (outcomes.pop(), "")
    )


def truth(kind: str, seed: int, known: dict) -> np.ndarray:
    if (kind, seed) not in known:
        import mlxrt

        with tempfile.TemporaryDirectory() as place:
            plain = sound(kind, seed).write_true(Path(place) / "true")
            with mlxrt.load(str(plain)) as engine:
                known[kind, seed] = np.array(engine.score(TOKENS))
    return known[kind, seed]


def wrong(folder: Path, damage: Damage, outcome: str, details: str, true: np.ndarray) -> str | None:
    """What is wrong with an outcome."""
    if outcome not in ("ok", "refused"):
        return f"{outcome}: {details}"
    if outcome == "refused" or damage.must == "any":
        return None
    if damage.must == "refuse":
        return "loaded, and must not"
    off = max(close(np.load(folder / f"logits{i}.npy"), true) for i in (0, 1))
    return None if off < LIMIT else f"loaded, and answers otherwise by {off:.1e}"


def fuzz(count: int, number: int, save: Path | None = None) -> tuple[Counter, list[str]]:
    """(outcomes, what was wrong)."""
    draw, known, outcomes, bad = random.Random(number), {}, Counter(), []
    place = Path(tempfile.mkdtemp(prefix="mlxrt-jang-fuzz-"))
    child: Child | None = None
    try:
        for i in range(count):
            folder = place / "checkpoint"
            shutil.rmtree(folder, ignore_errors=True)
            kind, seed, damage = damaged(draw, i, folder)
            child = child or Child(place / "log", serve)
            outcome, details = child.load(folder, SECONDS)
            if outcome in ("died", "hung") or i % FRESH == FRESH - 1:
                child.stop()
                child = None
            outcomes[damage.must, outcome] += 1
            if problem := wrong(folder, damage, outcome, details, truth(kind, seed, known)):
                bad.append(f"{kind} {seed}, {damage.what}: {problem}")
                if save is not None:
                    shutil.copytree(folder, save / f"{i:05}", dirs_exist_ok=True)
    finally:
        if child is not None:
            child.stop()
        shutil.rmtree(place, ignore_errors=True)
    return outcomes, bad


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, help="where checkpoints that failed are kept")
    options = parser.parse_args()
    outcomes, bad = fuzz(options.count, options.seed, options.save)
    for (must, outcome), count in sorted(outcomes.items()):
        print(f"must {must:7} {outcome:8} {count:6}")
    print("\n".join(bad[:40]))
    print(f"{outcomes.total()} checkpoints, {len(bad)} wrong")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
