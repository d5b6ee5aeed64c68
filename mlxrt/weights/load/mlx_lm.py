"""Filling a module that mlx-lm computes: it names its tensors itself, so every name is asked of its own `sanitize`.

Knows no architecture. What is left over or missing afterwards is an error, as for our own models.
"""

import logging
import re
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ...errors import BadCheckpoint, UnsupportedModel, shown
from ...models.mlx_lm_adapter import REFUSALS, MlxLm
from ..formats.checkpoint import Checkpoint
from ..formats.hadamard import Turned, turned
from ..formats.jang.labels import DROPS, jang_of
from ..formats.quantized import Layout, PackedEmbedding, contradictions, layout_of
from ..formats.weight_format import Stored
from .fill import Arrays, dequantised, load, main_dtype, place

log = logging.getLogger("mlxrt")

PREFIX = "module."
CODED = (".tq_packed", ".tq2_packed", ".jt_packed", ".codes")  # only our own modules compute with these


def fill_foreign(checkpoint: Checkpoint, *, dtype: mx.Dtype | None, dequantise: bool) -> MlxLm:
    model = MlxLm(MlxLm.parse(checkpoint.config))
    loaded, dtype = load(checkpoint, dtype)
    loaded = checked(checkpoint, loaded)
    named = sanitised(model.module, checkpoint.name, loaded)
    arrays = {f"{PREFIX}{name}": array for name, array in named.items()}
    dtype = dtype or main_dtype(arrays)
    bundle = jang_of(checkpoint.config)
    stored = find_layouts(model, arrays, hadamard=bundle is not None and bundle.hadamard)
    layouts = {path: layout for path, layout in stored.items() if isinstance(layout, Layout)}
    if line := contradictions(checkpoint.config, {p.removeprefix(PREFIX): layout for p, layout in layouts.items()}):
        log.warning(line)
    if unpacked := stored if dequantise else {p: x for p, x in stored.items() if isinstance(x, Turned)}:
        if not dequantise:
            log.info(
                f"{len(unpacked)} matrices are {unpacked[min(unpacked)]}; mlx-lm's modules do not turn: kept unpacked"
            )
        arrays = dequantised(arrays, unpacked, dtype)
    pack(model, {path: layout for path, layout in layouts.items() if path not in unpacked}, dtype)
    place(model, arrays, dtype)
    model.update(tree_unflatten(list(uncast(model.module, arrays).items())))
    log.info(model.told())
    return model


def checked(checkpoint: Checkpoint, arrays: Arrays) -> Arrays:
    """The tensors without a JANG bundle's extras, or why mlx-lm's module cannot compute with them."""
    if coded := sorted(name for name in arrays if name.endswith(CODED)):
        raise UnsupportedModel(
            f"{shown(coded[0])} is coded (JANGTQ or codebook), and {shown(checkpoint.config.get('model_type'))} is "
            "computed by mlx-lm's module, which has no such layers; take an affine JANG or MLX version"
        )
    if jang_of(checkpoint.config) is None:
        return arrays
    check_multipliers(checkpoint, arrays)
    return {n: a for n, a in arrays.items() if not any(re.search(pattern, n) for pattern, _ in DROPS)}


def check_multipliers(checkpoint: Checkpoint, arrays: Arrays) -> None:
    """mlx-lm multiplies muP's factors into weights whose convolutions are the original's, and JANG may have done so.

    Exactly one of both must; which, only JANG's stamp and the shape tell.
    """
    config = checkpoint.config
    factors = [key for key, v in config.items() if key.endswith(("_multiplier", "_multipliers")) and v not in (None, 1)]
    convs = [array for name, array in arrays.items() if name.endswith(".mamba.conv1d.weight") and array.ndim == 3]
    if not factors or not convs:
        return
    original, folded = convs[0].shape[-1] > convs[0].shape[1], bool(config.get("jang_mup_folded"))
    if original == folded:
        what = "twice" if folded else "never"
        raise BadCheckpoint(
            f"{checkpoint.name}: {shown(factors[0])} would be applied {what}: config.json "
            f"{'has' if folded else 'lacks'} jang_mup_folded; take a bundle of a newer converter"
        )


def sanitised(module: nn.Module, name: str, arrays: Arrays) -> Arrays:
    """The checkpoint's tensors under the module's names."""
    rename = getattr(module, "sanitize", None)  # mlx-lm asks in the same way: not every module has one
    if rename is None:
        return arrays
    try:
        return rename(arrays)
    except REFUSALS as bad:
        raise BadCheckpoint(
            f"{name}: mlx-lm cannot bring the tensors in order ({type(bad).__name__}: {str(bad)[:120]}); "
            "some are missing or have another shape than it expects"
        ) from None


def uncast(module: nn.Module, arrays: Arrays) -> Arrays:
    """The tensors that mlx-lm leaves as they are when it changes a model's dtype."""
    casts = getattr(module, "cast_predicate", None)
    return {n: a for n, a in arrays.items() if not casts(n.removeprefix(PREFIX))} if casts is not None else {}


def find_layouts(model: MlxLm, arrays: Mapping[str, mx.array], *, hadamard: bool) -> dict[str, Stored]:
    """The packed modules, stacks of experts among them."""
    modules = dict(model.named_modules())
    layouts: dict[str, Stored] = {}
    for path in [name.removesuffix(".scales") for name in arrays if name.endswith(".scales")]:
        if path not in modules or "weight" not in modules[path]:
            continue  # listed among the leftovers
        parts = {f"{path}.{part}": arrays.get(f"{path}.{part}") for part in ("weight", "scales", "biases")}
        one = {name: a[0] if a.ndim == 3 else a for name, a in parts.items() if a is not None}
        shape = modules[path]["weight"].shape
        layouts[path] = turned(path, shape, layout_of(path, shape[-1], one), arrays, hadamard=hadamard)
    return layouts


def pack(model: MlxLm, layouts: Mapping[str, Layout], dtype: mx.Dtype) -> None:
    def choice(path: str, module: nn.Module) -> bool | dict[str, Any]:
        layout = layouts.get(path)
        if layout is None or isinstance(module, nn.Embedding):
            return False
        return {"group_size": layout.group, "bits": layout.bits, "mode": layout.mode}

    tables = {p: m for p, m in model.named_modules() if p in layouts and isinstance(m, nn.Embedding)}
    nn.quantize(model, class_predicate=choice)
    for path, table in tables.items():
        owner, _, leaf = path.rpartition(".")
        rows, width = table["weight"].shape
        dict(model.named_modules())[owner][leaf] = PackedEmbedding(rows, width, layouts[path], dtype)
