"""Converts a model into another weight format, shard by shard and resumable.

Everything is written into DST.partial, which is renamed at the end. A shard is written under a temporary name, so an
existing one is complete and an interrupted conversion continues after it. encode.py has the arithmetic.
"""

import errno
import hashlib
import json
import logging
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from ...cache.files import atomic_write
from ...errors import BadCheckpoint, BadRequest, MlxrtError
from ...kernels.dtypes import DTYPES, FLOATS
from ..formats.checkpoint import Checkpoint
from ..formats.hadamard import is_rotated
from ..formats.quantized import AFFINE_GROUPS
from ..formats.safetensors import read_header
from . import encode
from .calibration import Importance
from .configs import make_config, make_jang_config
from .recipe import Encoding, Recipe
from .tensors import SourceModel, check_finite, open_source

log = logging.getLogger("mlxrt")

SHARD_BYTES = 4 << 30
JOURNAL = "convert.json"
TEMPORARY = ".{}.writing.safetensors"
KEEP_FP32 = "e_score_correction_bias"


@dataclass(frozen=True)
class Converted:
    folder: Path
    parameters: int
    nbytes: int

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes / self.parameters


@dataclass(frozen=True)
class TensorPlan:
    """One tensor of the model, how it is encoded and where it is written."""

    name: str
    shape: tuple[int, ...]
    encoding: Encoding
    file: str


def convert(
    checkpoint: Checkpoint,
    folder: Path,
    recipe: Recipe,
    shard_bytes: int = SHARD_BYTES,
    calibrate: Callable[[], Importance] = Importance,
    tokenizer: bool = True,
    on_tensor: Callable[[int, int], None] = lambda done, total: None,
) -> Converted:
    """Convert `checkpoint` into the new `folder`. `calibrate` is called if there are codebooks to learn, `on_tensor`
    after each tensor, with the values encoded so far and in all."""
    if folder.exists():
        raise BadRequest(f"{folder} exists; give a new folder")
    files = describe_files(checkpoint)
    source = open_source(checkpoint)
    recipe = replace(recipe, experts=source.experts)
    plans = plan_tensors(source, recipe, shard_bytes)
    report_odd_widths(plans, recipe)
    partial = folder.with_name(f"{folder.name}.partial")
    check_space(folder, stored_bytes(plans))
    learned = [plan.name for plan in plans if plan.encoding.kind == "codebook"]
    importance = calibrate() if learned else Importance()
    if importance.digest and (unseen := [name for name in learned if name not in importance.squares]):
        log.info(f"the sample did not reach {len(unseen)} matrices ({unseen[0]}): their inputs count equally")
    log_copies(plans, recipe.dtype)
    start(partial, files, recipe, plans, importance.digest)
    try:
        if tokenizer:
            checkpoint.save_tokenizer(partial)
        write_shards(partial, source, recipe, plans, importance, on_tensor)
        if describe_files(checkpoint) != files:  # shards of two models
            raise BadCheckpoint(f"{checkpoint.path} changed while it was converted; remove {partial} and start again")
        return finish(partial, folder, checkpoint, source, recipe, plans)
    except (OSError, MlxrtError) as error:
        raise abandon(partial, plans, error) from error


def stored_bytes(plans: list[TensorPlan]) -> int:
    return int(sum(math.prod(plan.shape) * plan.encoding.stored_bits / 8 for plan in plans))


def check_space(path: Path, need: int) -> None:
    """Refuse a disk that is too small before the first tensor is read."""
    there = next(place for place in path.absolute().parents if place.is_dir())
    if (free := shutil.disk_usage(there).free) < need:
        raise BadRequest(f"{path} needs about {need} bytes, its disk has {free} free; free space or choose another")


def log_copies(plans: list[TensorPlan], dtype: str | None) -> None:
    kinds = Counter(f"{p.encoding.mode} {p.encoding.bits} bit" for p in plans if p.encoding.kind == "copied")
    if kinds:
        listed = ", ".join(f"{count} as {kind}" for kind, count in kinds.most_common())
        scales = f", their scales as {dtype}" if dtype else ""
        log.info(f"{kinds.total()} matrices are in MLX's formats already and copied bit for bit{scales}: {listed}")


def report_odd_widths(plans: list[TensorPlan], recipe: Recipe) -> None:
    """Name matrices that stay float although the recipe packs them; refuse it where that is all of them."""
    packed = sum(plan.encoding.kind != "plain" for plan in plans)
    odd = [plan for plan in plans if plan.encoding.kind == "plain" and recipe.is_odd(plan.name, plan.shape)]
    if not odd:
        return
    found = f"{odd[0].name} has rows of {odd[0].shape[-1]} numbers, no multiple of {min(AFFINE_GROUPS)}"
    if not packed:
        raise BadRequest(f"no matrix can be quantised: {found}")
    log.warning(f"{len(odd)} of {len(odd) + packed} matrices stay float: {found}")


def abandon(partial: Path, plans: list[TensorPlan], error: Exception) -> Exception:
    """Remove what is incomplete; finished shards stay, so that the same command continues."""
    for path in partial.glob(TEMPORARY.format("*")):
        path.unlink()
    if not any((partial / plan.file).exists() for plan in plans):
        shutil.rmtree(partial, ignore_errors=True)
    elif isinstance(error, OSError):
        reason = error.strerror or str(error)
        return OSError(error.errno, f"{reason}; free space and give the same command again: it continues", str(partial))
    return error


def write_shards(
    partial: Path,
    source: SourceModel,
    recipe: Recipe,
    plans: list[TensorPlan],
    importance: Importance,
    on_tensor: Callable[[int, int], None],
) -> None:
    files = sorted({plan.file for plan in plans})
    done, total = 0, sum(math.prod(plan.shape) for plan in plans)
    for number, file in enumerate(files, 1):
        mine = [plan for plan in plans if plan.file == file]
        if (partial / file).exists():
            log.info(f"{number} of {len(files)}: {file} exists already")
            done += sum(math.prod(plan.shape) for plan in mine)
            continue
        made: dict[str, mx.array] = {}
        for plan in mine:
            made |= stored_tensors(source, plan, recipe, importance)
            mx.eval(made)  # one by one, to free the temporaries of encoding
            done += math.prod(plan.shape)
            on_tensor(done, total)
        write_shard(partial / file, made)
        log.info(f"{number} of {len(files)}: {file}, {len(mine)} tensors")


def plan_tensors(source: SourceModel, recipe: Recipe, shard_bytes: int) -> list[TensorPlan]:
    """All tensors with their files, in a fixed order."""
    names = sorted(source.shapes, key=lambda n: [(s.isdigit(), int(s) if s.isdigit() else 0, s) for s in n.split(".")])
    shards: list[list[str]] = [[]]
    filled = 0
    encodings = {name: recipe.choose(name, source.shapes[name], source.mlx_format(name)) for name in names}
    for name in [n for n in names if encodings[n].kind != "codebook"]:
        size = math.prod(source.shapes[name]) * encodings[name].bits // 8
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    total = len(shards)
    files = {n: f"model-{i:05}-of-{total:05}.safetensors" for i, shard in enumerate(shards, 1) for n in shard}
    return [TensorPlan(n, source.shapes[n], encodings[n], files.get(n) or codebook_file(n)) for n in names]


def codebook_file(name: str) -> str:
    path = name.split(".")
    return f"codebook-layer-{int(path[path.index('layers') + 1]):03d}-{path[-2]}.safetensors"


def describe_files(checkpoint: Checkpoint) -> list[tuple[str, int, int]]:
    """Name, size and date of each file of the source that is there."""
    paths = [path for path in checkpoint.files() if path.exists()]
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]


def start(
    partial: Path, files: list[tuple[str, int, int]], recipe: Recipe, plans: list[TensorPlan], calibration: str
) -> None:
    """Create the folder, or continue in that of an interrupted run of the same conversion."""
    settings = json.dumps([files, asdict(recipe), [asdict(plan) for plan in plans], calibration], default=str)
    digest = hashlib.sha256(settings.encode()).hexdigest()
    if partial.exists():
        known = (partial / JOURNAL).read_text() if (partial / JOURNAL).is_file() else ""
        if known != digest:
            raise BadRequest(f"{partial} holds another interrupted conversion; remove it or give another folder")
        log.info(f"continuing in {partial}")
        return
    partial.mkdir(parents=True)
    with atomic_write(partial / JOURNAL, mode=0o644) as out:
        out.write(digest.encode())


def encode_tensor(source: SourceModel, plan: TensorPlan, recipe: Recipe, importance: Importance) -> dict[str, mx.array]:
    """The encoded tensor, by the names of its parts."""
    encoding = plan.encoding
    if encoding.kind == "copied":
        path = plan.name.removesuffix(".weight")
        parts = source.formats[path].module_tensors(path, source.arrays)
        return {part: cast_float(array, plan, source, recipe) for part, array in parts.items()}
    array = source.tensor(plan.name)
    if encoding.kind == "plain":
        return {"": cast_float(array, plan, source, recipe)}
    if encoding.kind == "jangtq":
        return encode.jangtq(array, encoding.bits)
    if encoding.kind == "codebook":
        return encode.codebook(array, encoding.group_size, recipe.codebook_size, importance(plan.name, array.shape[-1]))
    dtype = float_dtype(source, recipe)
    rotation = None
    if recipe.hadamard and is_rotated(plan.name, encoding.bits):
        rotation = encode.hadamard_rotation(array.shape[-1])
    return encode.affine(array, encoding.bits, encoding.group_size, dtype, rotation)


def float_dtype(source: SourceModel, recipe: Recipe) -> mx.Dtype:
    if recipe.dtype is not None:
        return DTYPES[recipe.dtype]
    return source.dtype if recipe.format == "mlx" else mx.float16


def cast_float(array: mx.array, plan: TensorPlan, source: SourceModel, recipe: Recipe) -> mx.array:
    """Floats as the recipe stores them. MLX's format leaves them as they are, unless told, or unpacked just now."""
    if array.dtype not in FLOATS or plan.name.endswith(KEEP_FP32):
        return array
    unpacked = plan.encoding.kind == "plain" and plan.name.removesuffix(".weight") in source.formats
    kept = recipe.format == "mlx" and recipe.dtype is None and not unpacked
    return array if kept else array.astype(float_dtype(source, recipe))


def stored_tensors(
    source: SourceModel, plan: TensorPlan, recipe: Recipe, importance: Importance
) -> dict[str, mx.array]:
    """The encoded tensor under its names in the file."""
    made = encode_tensor(source, plan, recipe, importance)
    if plan.encoding.kind == "codebook":
        return made
    name = source.stored_name(plan.name)
    return {f"{name.removesuffix('.weight')}.{part}" if part else name: array for part, array in made.items()}


def write_shard(path: Path, arrays: dict[str, mx.array]) -> None:
    """Write, check and rename: a file is complete or absent."""
    ready = {name: mx.contiguous(check_finite(name, array)) for name, array in arrays.items()}
    mx.eval(ready)
    temporary = path.with_name(TEMPORARY.format(path.stem))
    try:
        mx.save_safetensors(str(temporary), ready, metadata={"format": "mlx"})
    except RuntimeError as error:  # MLX does not say why
        free = shutil.disk_usage(path.parent).free
        full = os.strerror(errno.ENOSPC) if free < sum(a.nbytes for a in ready.values()) else str(error)
        raise OSError(errno.ENOSPC, full, str(path)) from None
    read_header(temporary)
    with open(temporary, "rb+") as file:  # a file with the shard's name counts as complete, after a power cut too
        os.fsync(file.fileno())
    os.replace(temporary, path)


def finish(
    partial: Path, folder: Path, checkpoint: Checkpoint, source: SourceModel, recipe: Recipe, plans: list[TensorPlan]
) -> Converted:
    """Write config, index and tokenizer, then rename the folder."""
    headers = {file: read_header(partial / file) for file in sorted({plan.file for plan in plans})}
    nbytes = sum(info.nbytes for header in headers.values() for info in header.values())
    weight_map = {n: file for file, header in headers.items() if not file.startswith("codebook") for n in header}
    index = {"metadata": {"total_size": nbytes}, "weight_map": dict(sorted(weight_map.items()))}
    documents: dict[str, Mapping[str, Any]] = {
        "model.safetensors.index.json": index,
        "config.json": make_config(source, recipe, plans),
    }
    parameters = sum(math.prod(plan.shape) for plan in plans)
    if recipe.format != "mlx":
        documents["jang_config.json"] = make_jang_config(
            source, recipe, plans, 8 * nbytes / parameters, checkpoint.name
        )
    if generation := checkpoint.generation or read_ends(partial, checkpoint):
        documents["generation_config.json"] = generation
    for name, document in documents.items():
        (partial / name).write_text(json.dumps(document, indent=1, ensure_ascii=False), encoding="utf-8")
    os.replace(partial, folder)
    (folder / JOURNAL).unlink()  # last: without it, an interrupted run could not tell whose folder it is
    return Converted(folder, parameters, nbytes)


def read_ends(partial: Path, checkpoint: Checkpoint) -> dict[str, Any]:
    """The tokens that end an answer, where the source keeps them in its tokenizer: tokenizer_config.json names one."""
    if not (partial / "tokenizer_config.json").is_file():
        return {}
    ends = sorted(checkpoint.tokenizer().eos_ids)
    return {"eos_token_id": ends} if ends else {}
