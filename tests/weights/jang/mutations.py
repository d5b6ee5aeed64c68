"""Faults in checkpoints, drawn at random, each with what must follow: refused, the same answer, or either of both.

refuse: nothing may load. same: loads with the answer of the sound checkpoint, or is refused. any: values themselves
changed, so no loader can know; it loads or is refused, and nothing else happens.
"""

import copy
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .makers import MAKERS, JangCheckpoint

JUNK = [None, True, -1, 0, 3, 10**12, 0.5, "", "x", "JANG_9Z", [], [1], {}, {"a": 1}, [[{}]], "2.0", "bf16", 1e308]
HINTS = ("profile", "format", "weight_format", "version", "format_version", "mxtq_bits", "capabilities", "turboquant",
         "source_model", "runtime", "architecture", "routed_expert_layout", "expert_padding", "mtp")  # fmt: skip
SILENT = ("awq_scale", "awq_scales", "importance", "block_offsets")  # without them a checkpoint is another, sound one


@dataclass(frozen=True)
class Damage:
    kind: str
    what: str
    must: str  # refuse | same | any


def pick(draw: random.Random, checkpoint: JangCheckpoint) -> tuple[dict[str, np.ndarray], str]:
    """A file of the checkpoint and a tensor in it."""
    targets = [(checkpoint.tensors, name) for name in checkpoint.tensors]
    targets += [(tensors, name) for tensors in checkpoint.extra.values() for name in tensors]
    return draw.choice(targets)


def relabel(draw: random.Random, b: JangCheckpoint) -> tuple[str, str]:
    key, value = draw.choice(HINTS), copy.deepcopy(draw.choice(JUNK))
    place = b.config if b.labels is None or draw.random() < 0.3 else b.labels
    if place is b.config and key not in ("weight_format", "mxtq_bits"):
        place = b.config.setdefault("jang_config", {}) if b.labels is None else b.labels
    place[key] = value
    return f"label {key} = {value!r}", "same"


def lie_about_bits(draw: random.Random, b: JangCheckpoint) -> tuple[str, str]:
    quantization = b.config.setdefault("quantization", {})
    path = draw.choice([*quantization, "bits", "group_size"])
    value = draw.choice([{"bits": draw.choice([1, 2, 4, 8]), "group_size": draw.choice([32, 64, 128])}, *JUNK])
    if path in ("bits", "group_size", "mode"):
        quantization[path] = draw.choice([2, 3, 8, 32, 128, "x", None])
        return f"quantization.{path} = {quantization[path]!r}", "same"
    old = quantization[path]
    rotated = isinstance(old, dict) and "rotation" in old
    quantization[path] = {**old, **value} if isinstance(value, dict) and isinstance(old, dict) else value
    return f"quantization.{path} = {value!r}", "any" if rotated else "same"


def count_words(draw: random.Random, b: JangCheckpoint) -> tuple[str, str]:
    """Words that count: they are read, so junk in them is refused or means what it says."""
    key = draw.choice(["mxtq_seed", "hadamard_rotation", "quantization"])
    value = copy.deepcopy(draw.choice(JUNK))
    place = b.labels if b.labels is not None else b.config.setdefault("jang_config", {})
    if key == "hadamard_rotation":
        place = place.setdefault("quantization", {})
    if not isinstance(place, dict):
        return "nothing", "same"
    place[key] = value
    return f"{key} = {value!r}", "any"


def drop(draw: random.Random, b: JangCheckpoint) -> tuple[str, str]:
    place, name = pick(draw, b)
    del place[name]
    return f"without {name}", "any" if name.endswith(SILENT) else "refuse"


def rename(draw: random.Random, b: JangCheckpoint) -> tuple[str, str]:
    place, name = pick(draw, b)
    other = draw.choice([f"{name}x", f"x.{name}", name.replace("0", "7", 1), name.replace("_", "", 1), name.upper()])
    if other == name or other in place:
        return "nothing", "same"
    place[other] = place.pop(name)
    return f"{name} is called {other}", "any" if name.endswith(SILENT) else "refuse"


def add(draw: random.Random, b: JangCheckpoint) -> tuple[str, str]:
    _, name = pick(draw, b)
    path = name.rpartition(".")[0] or "model"
    parts = ["weight", "scales", "tq_packed", "tq2_packed", "codes", "qweight", "extra", "jt_packed"]
    other = f"{path}.{draw.choice(parts)}"
    if other in b.tensors:
        return "nothing", "same"
    b.tensors[other] = np.ones((2, 2), draw.choice([np.uint32, np.float16, np.uint8]))
    return f"more: {other}", "refuse"


def reshape(draw: random.Random, b: JangCheckpoint) -> tuple[str, str]:
    place, name = pick(draw, b)
    old = place[name]
    changes: list[Callable] = [
        lambda a: a[..., :-1], lambda a: a[:-1], lambda a: a[None], lambda a: a.T, lambda a: np.concatenate([a, a]),
        lambda a: np.concatenate([a, a], axis=-1), lambda a: a.reshape(-1), lambda a: a[:0],
    ]  # fmt: skip
    place[name] = np.ascontiguousarray(draw.choice(changes)(old))
    # twice the words in a row are the same row in twice the bits, as far as anyone can tell
    wider = name.endswith(("weight", "tq2_packed")) and place[name].shape == (*old.shape[:-1], 2 * old.shape[-1])
    return f"{name}: {old.shape} -> {place[name].shape}", "any" if wider or name.endswith(SILENT) else "same"


def retype(draw: random.Random, b: JangCheckpoint) -> tuple[str, str]:
    place, name = pick(draw, b)
    dtype = draw.choice(
        [np.float16, np.float32, np.float64, np.uint8, np.int8, np.uint16, np.int32, np.uint32, np.int64]
    )
    with np.errstate(all="ignore"):
        new = place[name].astype(dtype)
        kept = np.array_equal(new.astype(np.float64), place[name].astype(np.float64))
    place[name] = new
    return f"{name} as {np.dtype(dtype)}", "same" if kept else "any"


def poison(draw: random.Random, b: JangCheckpoint) -> tuple[str, str]:
    floats = [(p, n) for p, n in [pick(draw, b) for _ in range(50)] if p[n].dtype == np.float16 and p[n].size]
    if not floats:
        return "nothing", "same"
    place, name = floats[0]
    place[name] = place[name].copy()
    place[name].reshape(-1)[draw.randrange(place[name].size)] = draw.choice([np.nan, np.inf, -np.inf])
    if b.labels is None and "jang_config" not in b.config:  # a plain model: floats are not looked at
        return f"{name} poisoned", "any"
    return f"{name} poisoned", "refuse"


def overrun(draw: random.Random, b: JangCheckpoint) -> tuple[str, str]:
    """Indices beyond the codebook, bit widths the format does not have."""
    names = ("indices", ".codes", "tq_bits", ".bits", "bit_map", *(f"c{i}" for i in range(20)))
    targets = [(b.tensors, n) for n in b.tensors if n.endswith(names)]
    targets += [(t, n) for t in b.extra.values() for n in t if n.endswith(names)]
    if not targets:
        return "nothing", "same"
    target, name = draw.choice(targets)
    array = target[name].copy()
    old = array.reshape(-1)[0]
    array.reshape(-1)[0] = draw.choice([0, 1, 3, 5, 7, 9, 100, 200, 255])
    target[name] = array
    if array.reshape(-1)[0] == old:
        return "nothing", "same"
    return f"{name}[0] = {array.reshape(-1)[0]}", "any" if name.endswith(("codes", "indices")) or name[
        1:
    ].isdigit() else "refuse"


def cut_file(draw: random.Random, folder: Path) -> tuple[str, str]:
    file = draw.choice(sorted(folder.glob("*.safetensors")))
    data = file.read_bytes()
    at = draw.randrange(len(data))
    file.write_bytes(data[:at])
    return f"{file.name} cut to {at} bytes", "refuse"


def flip_bytes(draw: random.Random, folder: Path) -> tuple[str, str]:
    file = draw.choice(sorted(folder.iterdir()))
    data = bytearray(file.read_bytes())
    for _ in range(draw.choice([1, 2, 8])):
        data[draw.randrange(min(len(data), draw.choice([64, 4000, len(data)])))] = draw.randrange(256)
    file.write_bytes(bytes(data))
    return f"bytes of {file.name}", "any"


def spoil_json(draw: random.Random, folder: Path) -> tuple[str, str]:
    file = draw.choice(sorted(folder.glob("*.json")))
    document = json.loads(file.read_text())
    place, path = document, file.name
    while isinstance(place, dict | list) and place:
        key = draw.choice(sorted(place) if isinstance(place, dict) else list(range(len(place))))
        path += f".{key}"
        if not isinstance(place[key], dict | list) or not place[key] or draw.random() < 0.3:
            place[key] = copy.deepcopy(draw.choice(JUNK))
            break
        place = place[key]
    file.write_text(json.dumps(document))
    return path, "any"


def lose_file(draw: random.Random, folder: Path) -> tuple[str, str]:
    file = draw.choice(sorted(p for p in folder.iterdir() if p.suffix == ".safetensors"))
    file.unlink()
    return f"without {file.name}", "refuse"


INSIDE = (
    relabel,
    relabel,
    lie_about_bits,
    count_words,
    drop,
    drop,
    rename,
    add,
    reshape,
    reshape,
    retype,
    poison,
    overrun,
)
OUTSIDE = (cut_file, flip_bytes, spoil_json, spoil_json, lose_file)


def damaged(draw: random.Random, number: int, folder: Path) -> tuple[str, int, Damage]:
    """Write one damaged checkpoint; (kind, seed, damage)."""
    kind, seed = draw.choice(sorted(MAKERS)), draw.randrange(2)
    checkpoint = copy.deepcopy(sound(kind, seed))
    inside = draw.random() < 0.7
    if inside:
        what, must = draw.choice(INSIDE)(draw, checkpoint)
    checkpoint.write(folder)
    if not inside:
        what, must = draw.choice(OUTSIDE)(draw, folder)
    return kind, seed, Damage(kind, what, must)


MADE: dict[tuple[str, int], JangCheckpoint] = {}


def sound(kind: str, seed: int) -> JangCheckpoint:
    if (kind, seed) not in MADE:
        MADE[kind, seed] = MAKERS[kind](seed)
    return MADE[kind, seed]
