"""Kill -9 while states are saved and records are written; then look at everything that is there.

    python -m tests.long.kill_during_save --saves 200 [--seed 1]

A child answers turns of a conversation with a disk cache, saves each to one file and to a bundle, and is killed at a
random moment. Afterwards every state restores and goes on exactly as a fresh run does, or is absent; every record of
the disk cache is sound. One difference fails the run.
"""

import argparse
import dataclasses
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import mlx.core as mx

import mlxrt
from mlxrt import Engine, EngineConfig, Session
from mlxrt.cache.storage.archive import Archive
from mlxrt.cache.storage.checksummed import read_verified_header
from mlxrt.text import Tokenizer
from tests.cli.conftest import write_tokenizer
from tests.support import toy_models as toy

ROOT = Path(__file__).resolve().parents[2]
SINGLE, BUNDLE, STORE, WORDS = "single.state", "bundle", "store", "tokenizer"


def open_engine(folder: Path, **options) -> Engine:
    mx.random.seed(0)
    config = dataclasses.replace(toy.CONFIG, vocab_size=258, num_hidden_layers=2)
    model = type("Toy", (toy.Toy,), {"kinds": "wf"})(config)
    model.fuse()
    return Engine(model, EngineConfig(**options), Tokenizer.from_folder(folder / WORDS))


def child(folder: Path, seed: int) -> None:
    """Save until killed; one line for every save that is complete."""
    engine = open_engine(folder, disk_cache=str(folder / STORE), disk_cache_bytes="2M")
    print("ready", flush=True)
    for i in range(10_000):
        session = engine.session(f"{seed} {i}")
        for turn in range(2):
            session.say(f"question {turn}", max_tokens=3).text  # noqa: B018
            session.save(folder / SINGLE)
            print("saved", flush=True)
            session.save(folder / BUNDLE, name=f"talk {i % 3}")
            print("saved", flush=True)


def run_and_kill(folder: Path, rng: random.Random, seed: int) -> int:
    """Start a child, let it save a little, kill it somewhere; how many saves it had completed."""
    command = [sys.executable, "-m", "tests.long.kill_during_save", "--child", str(folder), "--seed", str(seed)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        least = rng.randrange(2, 12)
        for _ in range(least):
            assert process.stdout.readline() == "saved\n"
        threading.Event().wait(rng.random() * 0.06)
        os.kill(process.pid, signal.SIGKILL)
        return least + process.stdout.read().count("saved\n")


def check(folder: Path, fresh: Engine) -> int:
    """Everything that is there is right; how many states were."""
    engine = open_engine(folder)
    names = list(Archive(folder / BUNDLE).entries()) if (folder / BUNDLE).is_dir() else []
    states: list[tuple[Path, str | None]] = [(folder / BUNDLE, name) for name in names]
    if (folder / SINGLE).exists():
        states.append((folder / SINGLE, None))
    for path, name in states:
        restored = Session.restore(engine, path, name)
        known = len(restored.tokens)
        done = restored.say("and now?", max_tokens=3).completion
        assert done.cached_tokens >= known - 1, (path, name, done.cached_tokens, known)
        assert done.tokens == fresh.generate(list(restored.tokens[:-3]), max_tokens=3).tokens, (path, name)
    for record in (folder / STORE).glob("*/*-*.safetensors"):
        read_verified_header(record)
    check_store(folder, fresh)
    return len(states)


def check_store(folder: Path, fresh: Engine) -> None:
    """A new engine on the disk cache answers as one without; it finds no record damaged."""
    with open_engine(folder, disk_cache=str(folder / STORE), disk_cache_bytes="2M") as engine:
        for i in range(2):
            prompt = engine.tokenizer.chat([{"role": "system", "content": f"0 {i}"}, {"role": "user", "content": "hm"}])
            assert engine.generate(prompt, max_tokens=3).tokens == fresh.generate(prompt, max_tokens=3).tokens
        assert engine.core.disk is not None and engine.core.disk.verify() == 0 and engine.stats().disk.corrupt == 0


def torture(folder: Path, saves: int, seed: int) -> tuple[int, int, int]:
    """Kills, completed saves, states that were checked."""
    (folder / WORDS).mkdir()
    write_tokenizer(folder / WORDS)
    rng, kills, done, checked = random.Random(seed), 0, 0, 0
    fresh = open_engine(folder, prefix_cache=False)
    while done < saves:
        done += run_and_kill(folder, rng, kills % 3)
        kills += 1
        checked += check(folder, fresh)
    return kills, done, checked


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--saves", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--child", type=Path)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.seed)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("MLXRT_CACHE", str(Path(folder) / "cache"))
        try:
            kills, done, checked = torture(Path(folder), args.saves, args.seed)
        except (AssertionError, mlxrt.MlxrtError) as wrong:
            print(f"WRONG: {type(wrong).__name__}: {wrong}")
            return 1
        left = len(list(Path(folder).rglob(".mlxrt-partial-*")))
    print(
        f"{kills} kills, over {done} completed saves; {checked} states checked, none wrong; {left} half-written files"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
