"""A model written again in another format: shard by shard, resumable, and there only when all of it is.

Everything is written into DST.partial, which is renamed at the end. A shard that is there is whole (it is renamed into
its place), so a conversion that was stopped goes on behind it. Knows no arithmetic: encode.py has it.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ...errors import BadRequest
from ..formats.checkpoint import Checkpoint
from ..formats.hadamard import FEWEST_BITS, UNTURNED
from ..formats.quantized import FLOATS
from ..formats.safetensors import read_header
from . import encode
from .importance import Importance
from .labels import config_text, labels_text
from .recipe import Choice, Recipe
from .tensors import PlainModel, check_finite, open_plain

log = logging.getLogger("mlxrt")

SHARD = 4 << 30
JOURNAL = "convert.json"
WIDE = "e_score_correction_bias"


@dataclass(frozen=True)
class Converted:
    folder: Path
    parameters: int
    nbytes: int

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes / self.parameters


@dataclass(frozen=True)
class Piece:
    """One tensor of the model and what becomes of it."""

    name: str
    shape: tuple[int, ...]
    choice: Choice
    file: str  # where it goes


def convert(
    checkpoint: Checkpoint,
    folder: Path,
    recipe: Recipe,
    shard_bytes: int = SHARD,
    weigh: Callable[[], Importance] = Importance,
) -> Converted:
    """Write `checkpoint` into the new `folder`. `weigh` is asked where codebooks are learned, which alone use it."""
    if folder.exists():
        raise BadRequest(f"{folder} exists; give a folder that is not there yet")
    plain = open_plain(checkpoint)
    recipe = Recipe(**{**vars(recipe), "experts": plain.experts})
    pieces = plan(plain, recipe, shard_bytes)
    partial = folder.with_name(f"{folder.name}.partial")
    learned = [piece.name for piece in pieces if piece.choice.form == "codebook"]
    importance = weigh() if learned else Importance()
    if importance.digest and (unseen := [name for name in learned if name not in importance.squares]):
        log.info(f"the sample did not reach {len(unseen)} matrices ({unseen[0]}): their weights count alike")
    start(partial, checkpoint, recipe, pieces, importance.digest)
    files = sorted({piece.file for piece in pieces})
    for number, file in enumerate(files, 1):
        if (partial / file).exists():
            log.info(f"{number} of {len(files)}: {file} is there already")
            continue
        mine = [piece for piece in pieces if piece.file == file]
        made: dict[str, mx.array] = {}
        for piece in mine:
            made |= tensors(plain, piece, recipe, importance)
            mx.eval(made)  # one by one: what encoding needs in between is freed before the next
        write_shard(partial / file, made)
        log.info(f"{number} of {len(files)}: {file}, {len(mine)} tensors")
    return finish(partial, folder, checkpoint, plain, recipe, pieces)


def plan(plain: PlainModel, recipe: Recipe, shard_bytes: int) -> list[Piece]:
    """Every tensor with its file, in an order that never changes."""
    names = sorted(
        plain.shapes, key=lambda name: [(s.isdigit(), int(s) if s.isdigit() else 0, s) for s in name.split(".")]
    )
    shards: list[list[str]] = [[]]
    held = 0
    made: dict[str, Choice] = {name: recipe.choose(name, plain.shapes[name]) for name in names}
    for name in [n for n in names if made[n].form != "codebook"]:
        size = stored_bytes(plain.shapes[name], made[name])
        if shards[-1] and held + size > shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += size
    total = len(shards)
    place = {n: f"model-{i:05}-of-{total:05}.safetensors" for i, shard in enumerate(shards, 1) for n in shard}
    return [Piece(n, plain.shapes[n], made[n], place.get(n) or codebook_file(n)) for n in names]


def codebook_file(name: str) -> str:
    path = name.split(".")
    return f"codebook-layer-{int(path[path.index('layers') + 1]):03d}-{path[-2]}.safetensors"


def stored_bytes(shape: tuple[int, ...], choice: Choice) -> int:
    count = 1
    for n in shape:
        count *= n
    return count * choice.bits // 8


def start(partial: Path, checkpoint: Checkpoint, recipe: Recipe, pieces: list[Piece], weighed: str) -> None:
    """The folder for a new conversion, or the one that an earlier run of the same left."""
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in checkpoint.files()]
    what = json.dumps([stats, asdict(recipe), [asdict(piece) for piece in pieces], weighed], default=str)
    digest = hashlib.sha256(what.encode()).hexdigest()
    if partial.exists():
        known = (partial / JOURNAL).read_text() if (partial / JOURNAL).is_file() else ""
        if known != digest:
            raise BadRequest(f"{partial} holds another conversion that was stopped; remove it or give another folder")
        log.info(f"going on where {partial} was left")
        return
    partial.mkdir(parents=True)
    (partial / JOURNAL).write_text(digest)


def stored(plain: PlainModel, piece: Piece, recipe: Recipe, importance: Importance) -> dict[str, mx.array]:
    """A tensor's stored form, by the names of its parts."""
    array = plain.tensor(piece.name)
    choice = piece.choice
    if choice.form == "plain":
        return {"": as_float(array, piece.name, recipe, plain)}
    if choice.form == "jangtq":
        return encode.jangtq(array, choice.bits)
    if choice.form == "codebook":
        return encode.codebook(array, choice.group, recipe.codes, importance(piece.name, array.shape[-1]))
    dtype = plain.dtype if recipe.format == "mlx" else mx.float16
    turns = recipe.hadamard and choice.bits >= FEWEST_BITS and not any(word in piece.name.lower() for word in UNTURNED)
    return encode.affine(array, choice.bits, choice.group, dtype, encode.turning(array.shape[-1]) if turns else None)


def as_float(array: mx.array, name: str, recipe: Recipe, plain: PlainModel) -> mx.array:
    if array.dtype not in FLOATS or recipe.format == "mlx" or name.endswith(WIDE):
        return array
    return array.astype(mx.float16)


def tensors(plain: PlainModel, piece: Piece, recipe: Recipe, importance: Importance) -> dict[str, mx.array]:
    """What one tensor becomes, under the names it has in its file."""
    made = stored(plain, piece, recipe, importance)
    if piece.choice.form == "codebook":
        return made
    name = plain.stored_name(piece.name)
    return {f"{name.removesuffix('.weight')}.{part}" if part else name: array for part, array in made.items()}


def write_shard(path: Path, arrays: dict[str, mx.array]) -> None:
    """All of a file or nothing of it."""
    whole = {name: mx.contiguous(check_finite(name, array)) for name, array in arrays.items()}
    mx.eval(whole)
    waiting = path.with_name(f".{path.stem}.writing.safetensors")
    mx.save_safetensors(str(waiting), whole, metadata={"format": "mlx"})
    read_header(waiting)
    os.replace(waiting, path)


def finish(
    partial: Path,
    folder: Path,
    checkpoint: Checkpoint,
    plain: PlainModel,
    recipe: Recipe,
    pieces: list[Piece],
) -> Converted:
    """Labels, index and tokenizer; then the folder gets its name."""
    headers = {file: read_header(partial / file) for file in sorted({piece.file for piece in pieces})}
    nbytes = sum(info.nbytes for header in headers.values() for info in header.values())
    mapped = {n: file for file, header in headers.items() if not file.startswith("codebook") for n in header}
    index = {"metadata": {"total_size": nbytes}, "weight_map": dict(sorted(mapped.items()))}
    texts: dict[str, Mapping[str, Any]] = {
        "model.safetensors.index.json": index,
        "config.json": config_text(plain, recipe, pieces),
    }
    parameters = sum(count(piece.shape) for piece in pieces)
    if recipe.format != "mlx":
        texts["jang_config.json"] = labels_text(plain, recipe, pieces, 8 * nbytes / parameters, checkpoint.name)
    if checkpoint.generation:
        texts["generation_config.json"] = checkpoint.generation
    for name, said in texts.items():
        (partial / name).write_text(json.dumps(said, indent=1, ensure_ascii=False), encoding="utf-8")
    checkpoint.save_tokenizer(partial)
    (partial / JOURNAL).unlink()
    os.replace(partial, folder)
    return Converted(folder, parameters, nbytes)


def count(shape: tuple[int, ...]) -> int:
    product = 1
    for n in shape:
        product *= n
    return product
