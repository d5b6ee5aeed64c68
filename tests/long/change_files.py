"""A model's files are changed, replaced, touched and removed while engines load, answer, save, restore and cache.

    python -m tests.long.change_files [--orders 200] [--seed 1] [--gguf] [--processes 4]

Random orders. A state, or a record of the disk cache, that another model computed is never accepted; one that the same
bytes computed always is, whatever happened to the files since; every answer is the one of the files that were loaded.
Half of the orders treat all files as too large to be hashed at load: there a state may be refused, with an error that
names the file, once that file has moved. Exit code 1 on any difference.
"""

import argparse
import json
import os
import random
import sys
import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import mlxrt
from mlxrt import Engine, EngineConfig
from mlxrt.weights import identity
from tests.cli.conftest import TEMPLATE, write_tokenizer
from tests.support import tiny_files
from tests.support.parallel import run_parts, split

PROMPT = tuple((7 * i + 3) % 48 for i in range(24))
OLD_NS = 1_600_000_000_000_000_000
Label = tuple[int, ...]  # which variant of each file


@cache
def variants(gguf: bool) -> dict[str, list[bytes]]:
    """Two contents of each file, as long as each other."""
    weights = [tiny_files.float_weights(tiny_files.CONFIG, seed) for seed in (0, 1)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if gguf:
            files = [tiny_files.write_gguf(folder / f"{i}.gguf", w, extra=add_theta) for i, w in enumerate(weights)]
            return {"model.gguf": [file.read_bytes() for file in files]}
        made = []
        for theta, template, arrays in zip((10000.0, 80000.0), (TEMPLATE, TEMPLATE.upper()), weights):
            tiny_files.write_folder(folder, arrays, tiny_files.CONFIG | {"rope_theta": theta})
            write_tokenizer(folder, template)
            with open(folder / "tokenizer.json", "a") as file:
                file.write(" \n"[len(made)])  # the same vocabulary, other bytes
            made.append({file.name: file.read_bytes() for file in sorted(folder.iterdir())})
        return {name: [content[name] for content in made] for name in made[0]}


def add_theta(writer) -> None:
    writer.add_rope_freq_base(10000.0)


def write_all(folder: Path, label: Label, gguf: bool) -> Path:
    folder.mkdir(exist_ok=True)
    for (name, contents), i in zip(variants(gguf).items(), label):
        (folder / name).write_bytes(contents[i])
    return folder / "model.gguf" if gguf else folder


@cache
def truth(label: Label, gguf: bool) -> tuple[int, ...]:
    """What the files say, with nothing that was computed before."""
    with tempfile.TemporaryDirectory() as name:
        path = write_all(Path(name) / "m", label, gguf)
        with mlxrt.load(str(path), EngineConfig(chunk=16, prefix_cache=False)) as engine:
            return engine.generate(PROMPT, max_tokens=8, ignore_eos=True).tokens


@dataclass
class Loaded:
    engine: Engine
    label: Label
    moved: set[str] = field(default_factory=set)  # files that something happened to since


class Order:
    """One random order of events."""

    def __init__(self, root: Path, rng: random.Random, gguf: bool, strict: bool):
        self.root, self.rng, self.gguf, self.strict = root, rng, gguf, strict
        self.names = list(variants(gguf))
        self.disk: dict[str, int | None] = dict.fromkeys(self.names, 0)
        self.path = write_all(root / "m", (0,) * len(self.names), gguf)
        self.engines: list[Loaded] = []
        self.states: list[tuple[Path, Label]] = []
        self.log: list[str] = []
        self.wrong: list[str] = []
        self.accepted = self.refused = self.unnamed = 0

    def run(self, events: int) -> None:
        acts = [self.load] * 3 + [self.change] * 4 + [self.answer] * 2 + [self.save] * 3 + [self.restore] * 4
        for _ in range(events):
            act = self.rng.choice(acts)
            self.log.append(act.__name__)
            act()
        for loaded in self.engines:
            loaded.engine.close()

    def fail(self, what: str) -> None:
        self.wrong.append(f"{what} after {' '.join(self.log)}")

    def load(self) -> None:
        config = EngineConfig(chunk=16, disk_cache=str(self.root / "store") if self.rng.random() < 0.5 else None)
        try:
            engine = mlxrt.load(str(self.path), config)
        except mlxrt.MlxrtError as error:
            if None not in self.disk.values():
                self.fail(f"not loaded: {error}")
            return
        label = tuple(-1 if i is None else i for i in self.disk.values())
        if len(self.engines) > 2:
            self.engines.pop(0).engine.close()
        self.engines.append(Loaded(engine, label))

    def change(self) -> None:
        name = self.rng.choice(self.names)
        path, how = self.root / "m" / name, self.rng.choice(["write", "replace", "replace", "touch", "remove", "hide"])
        self.log[-1] = f"{how}:{name}"
        for loaded in self.engines:
            loaded.moved.add(name)
        if how == "remove" and self.rng.random() < 0.5:
            path.unlink(missing_ok=True)
            self.disk[name] = None
            return
        if how == "touch" and self.disk[name] is not None:
            os.utime(path)
            return
        i = self.rng.randrange(2)
        before = path.stat().st_mtime_ns if path.exists() else OLD_NS
        if how == "replace":
            fresh = path.with_name(".new")
            fresh.write_bytes(variants(self.gguf)[name][i])
            os.replace(fresh, path)
        else:
            path.write_bytes(variants(self.gguf)[name][i])
        if how == "hide":
            os.utime(path, ns=(before, before))
        self.disk[name] = i

    def pick(self) -> Loaded | None:
        return self.rng.choice(self.engines) if self.engines else None

    def answer(self) -> None:
        if (loaded := self.pick()) is None or -1 in loaded.label:
            return
        cut = self.rng.randrange(4)
        done = loaded.engine.generate(PROMPT, max_tokens=8 - cut, ignore_eos=True)
        if done.tokens != truth(loaded.label, self.gguf)[: 8 - cut]:
            self.fail(f"wrong tokens, {done.cached_tokens} cached")

    def save(self) -> None:
        if (loaded := self.pick()) is None or -1 in loaded.label:
            return
        path = self.root / f"{len(self.states)}.state"
        try:
            state = loaded.engine.compute_state(PROMPT)
            loaded.engine.save_state(path, state, {})
        except mlxrt.BadSnapshot as error:
            self.check_refusal(loaded, error)
        else:
            self.states.append((path, loaded.label))

    def restore(self) -> None:
        if (loaded := self.pick()) is None or not self.states or -1 in loaded.label:
            return
        path, label = self.rng.choice(self.states)
        loaded.engine.core.prefix_cache.clear()
        try:
            loaded.engine.load_state(path, None, lambda extra: extra)
        except mlxrt.BadSnapshot as error:
            self.refused += label != loaded.label
            if label == loaded.label:
                self.check_refusal(loaded, error)
        else:
            self.accepted += 1
            if label != loaded.label:
                self.fail(f"a state of {label} was accepted by {loaded.label}")
        self.answer()

    def check_refusal(self, loaded: Loaded, error: Exception) -> None:
        """A right state may be refused only where nothing can be known: a file that was not hashed has moved."""
        self.unnamed += 1
        named = [name for name in loaded.moved if f"{os.sep}{name} " in str(error)]
        if self.strict or not named:
            self.fail(f"refused without cause: {error}")


def run_orders(
    root: Path, orders: int, seed: int, gguf: bool, events: int = 14, first: int = 0
) -> tuple[list[str], list[int]]:
    """What went wrong; and how many states were accepted, refused, and refused because a file had moved."""
    wrong, counts, usual = [], [0, 0, 0], identity.HASHED_AT_LOAD
    for n in range(first, first + orders):
        folder = root / str(n)
        folder.mkdir()
        strict = n % 2 == 0
        identity.HASHED_AT_LOAD = usual if strict else 0
        order = Order(folder, random.Random(f"{seed} {n}"), gguf, strict)
        try:
            order.run(events)
        finally:
            identity.HASHED_AT_LOAD = usual
        wrong += order.wrong
        counts = [a + b for a, b in zip(counts, (order.accepted, order.refused, order.unnamed))]
    return wrong, counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--orders", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--gguf", action="store_true")
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    parts = [(first, n, options.seed, options.gguf) for first, n in split(options.orders, options.processes)]
    wrong, accepted, refused, unnamed = [], 0, 0, 0
    for found, counts in run_parts(run_part, parts, options.processes):
        wrong += found
        accepted, refused, unnamed = accepted + counts[0], refused + counts[1], unnamed + counts[2]
    print(f"{options.orders} orders: {accepted} states accepted, {refused} of another model refused, {unnamed} refused")
    print(f"because a file had moved; {len(wrong)} wrong")
    print(json.dumps(wrong[:10], indent=1) if wrong else "")
    return 1 if wrong else 0


def run_part(first: int, orders: int, seed: int, gguf: bool) -> tuple[list[str], list[int]]:
    with tempfile.TemporaryDirectory() as name:
        os.environ["MLXRT_CACHE"] = f"{name}/cache"
        return run_orders(Path(name), orders, seed, gguf, first=first)


if __name__ == "__main__":
    sys.exit(main())
