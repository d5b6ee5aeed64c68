"""Logits that Hugging Face computed, and everything an engine's caches must do without leaving them.

A fixture is a folder with a tiny checkpoint, its variants (meta.json) and reference logits. A row is one variant; its
checks go through the protocols of tests/parity_adapter.py: whole sequences, chunks, single tokens, cut-backs, forks, a
saved state, a batch.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

HERE = Path(__file__).parents[1] / "parity"
MIN_TOLERANCE, NOISE = 1e-3, 4  # of logits: at least, and as a multiple of Hugging Face's own float32 noise
SLACK = 64  # positions that may be computed again after a cut-back, a fork or a load: one block
CHUNKS = ((3,), (5, 1, 9, 2), (7,), (8,), (9,), (17,), (1, 1 << 20), (1,))
LONG_CHUNKS = ((64,), (37,), (1,))
BY_PREFILL, BY_DECODE = (1 << 20,), (20, *[1] * 99)
LENGTHS = (1, 7, 33, 64)


@dataclass(frozen=True)
class Row:
    fixture: Path
    variant: str
    spec: dict[str, Any]
    tolerance: float

    def __str__(self) -> str:
        return self.fixture.name + (f"@{self.variant}" if self.variant else "")

    def make_checkpoint(self, folder: Path) -> None:
        shutil.copy(self.fixture / self.spec["config"], folder / "config.json")
        weights = self.fixture / self.spec["weights"]
        if self.spec.get("transform") == "split_experts":
            mx.save_safetensors(str(folder / "model.safetensors"), split_experts(mx.load(str(weights))))
        else:
            shutil.copy(weights, folder / "model.safetensors")


def list_rows(root: Path = HERE) -> list[Row]:
    rows = []
    for meta in sorted(root.glob("*/meta.json")):
        known = json.loads(meta.read_text())
        base = {"config": "config.json", "weights": "model.safetensors", "ref": "ref.npz"}
        for variant, spec in {"": base, **known["variants"]}.items():
            noise = spec.get("stats", known["stats"])["noise_f32_vs_f64"]
            rows.append(Row(meta.parent, variant, spec, max(MIN_TOLERANCE, NOISE * noise)))
    return rows


def split_experts(stored: Any) -> dict[str, mx.array]:
    """Stacked experts as one tensor each, as transformers 5 saves them."""
    out: dict[str, mx.array] = {}
    for name, array in stored.items():
        stem, _, leaf = name.rpartition(".experts.")
        if name.startswith("mtp."):
            continue
        if not stem or leaf not in ("gate_up_proj", "down_proj"):
            out[name] = array
            continue
        for e in range(array.shape[0]):
            parts = mx.split(array[e], 2) if leaf == "gate_up_proj" else [array[e]]
            names = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else ("down_proj",)
            out |= {f"{stem}.experts.{e}.{n}.weight": mx.contiguous(part) for n, part in zip(names, parts)}
    return out


@dataclass
class RowCheck:
    """Runs a row's checks and collects what is wrong."""

    row: Row
    path: str
    ref: Any = None
    count: int = 0
    largest: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ref = dict(np.load(self.row.fixture / self.row.spec["ref"]))

    def lengths(self, name: str) -> list[int]:
        """Of the sequences that the row has: a variant may have fewer."""
        return [n for n in LENGTHS if f"{name}{n}.tokens" in self.ref]

    def tokens(self, name: str) -> list[int]:
        return self.ref[f"{name}.tokens"].tolist()

    def compare(self, name: str, got: Any, expected: np.ndarray) -> None:
        self.count += 1
        got = np.asarray(got, np.float32)
        error = float(np.abs(got - expected).max()) if got.shape == expected.shape else np.inf
        self.largest = max(self.largest, error)
        if not error <= self.row.tolerance:
            self.wrong.append(f"{name}: logits are off by {error:.2e}, {self.row.tolerance:.1e} allowed")

    def equal(self, name: str, got: list[int], expected: list[int]) -> None:
        self.count += 1
        if got != expected:
            at = next((i for i, (a, b) in enumerate(zip(got, expected)) if a != b), min(len(got), len(expected)))
            self.wrong.append(f"{name}: greedy tokens differ at {at}")

    def whole(self, logits: Callable[[str, list[int]], np.ndarray]) -> None:
        for n in self.lengths("len"):
            self.compare(f"{n} tokens", logits(self.path, self.tokens(f"len{n}")), self.ref[f"len{n}.logits"])
        self.compare("long", logits(self.path, self.tokens("long"))[self.ref["long.pos"]], self.ref["long.logits"])

    def feed(self, stepper: Any, tokens: list[int], pattern: tuple[int, ...]) -> np.ndarray:
        """Logits of tokens fed in pieces; no more positions are computed than a cache should."""
        before, rows = stepper.computed(), [stepper.feed(piece) for piece in pieces(tokens, pattern)]
        if (again := stepper.computed() - before - len(tokens)) > SLACK:
            self.wrong.append(f"{len(tokens)} tokens fed, {again} positions computed again")
        return np.concatenate(rows)

    def steps(self, stepper: Any) -> None:
        for name in (f"len{n}" for n in self.lengths("len") if n > 7):
            for pattern in (*CHUNKS, (len(self.tokens(name)) - 1, 1)):
                stepper.reset()
                got = self.feed(stepper, self.tokens(name), pattern)
                self.compare(f"{name} in {pattern}", got, self.ref[f"{name}.logits"])
        for pattern in LONG_CHUNKS:
            stepper.reset()
            got = self.feed(stepper, self.tokens("long"), pattern)[self.ref["long.pos"]]
            self.compare(f"long in {pattern}", got, self.ref["long.logits"])
        for n in self.lengths("greedy"):
            self.equal(f"greedy after {n}", self.greedy(stepper, n), self.tokens(f"greedy{n}"))
        self.reuse(stepper)

    def greedy(self, stepper: Any, n: int) -> list[int]:
        stepper.reset()
        row, said = stepper.feed(self.tokens(f"len{n}"))[-1], []
        for _ in self.tokens(f"greedy{n}"):
            said.append(int(row.argmax()))
            row = stepper.feed(said[-1:])[-1]
        return said

    def reuse(self, stepper: Any) -> None:
        """Cut-backs and forks of what was computed by prefill or token by token, continued in either way."""
        for name in sorted(key.removesuffix(".keep") for key in self.ref if key.endswith(".keep")):
            base, suffix = self.ref[f"{name}.base"].tolist(), self.ref[f"{name}.suffix"].tolist()
            cut = len(base) - int(self.ref[f"{name}.keep"])
            for made in (BY_PREFILL, BY_DECODE):
                for onward in (BY_PREFILL, (1,)):
                    stepper.reset()
                    self.feed(stepper, base, made)
                    at = stepper
                    if name == "reuse_fork":
                        at = stepper.fork()
                        self.feed(stepper, self.tokens("len7"), onward)  # disturbs the original
                    elif not stepper.trim(cut):
                        self.wrong.append(f"{name}: refused to cut {cut} tokens")
                        continue
                    got = self.feed(at, suffix, onward)
                    how = f"{'prefill' if made is BY_PREFILL else 'decode'}, then {onward[0]}"
                    self.compare(f"{name} ({how})", got, self.ref[f"{name}.logits"])
        if "reuse_fork.base" in self.ref:
            stepper.reset()
            self.feed(stepper, self.ref["reuse_fork.base"].tolist(), BY_DECODE)
            stepper.roundtrip()
            got = self.feed(stepper, self.ref["reuse_fork.suffix"].tolist(), (1,))
            self.compare("saved and loaded", got, self.ref["reuse_fork.logits"])

    def batch(self, batch: Callable[[str, list[list[int]], int], list[list[int]]]) -> None:
        lengths = self.lengths("greedy")[::-1]
        said = batch(self.path, [self.tokens(f"len{n}") for n in lengths], 24)
        for n, tokens in zip(lengths, said, strict=True):
            self.equal(f"batch, greedy after {n}", tokens, self.tokens(f"greedy{n}"))


def pieces(tokens: list[int], pattern: tuple[int, ...]) -> Iterator[list[int]]:
    at, turn = 0, 0
    while at < len(tokens):
        n = pattern[turn % len(pattern)]
        yield tokens[at : at + n]
        at, turn = at + n, turn + 1
