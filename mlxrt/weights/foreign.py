"""Filling a module that mlx-lm computes: it names its tensors itself, so every name is asked of its own `sanitize`.

Knows no architecture. What is left over or missing afterwards is an error, as for our own models.
"""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ..errors import BadCheckpoint
from ..models.mlx_lm_adapter import REFUSALS, MlxLm
from .checkpoint import Checkpoint, Say
from .fill import Arrays, dequantised, load, main_dtype, place
from .quantised import Layout, PackedEmbedding, contradictions, layout_of

PREFIX = "module."


def fill_foreign(checkpoint: Checkpoint, *, dtype: mx.Dtype | None, dequantise: bool, say: Say) -> MlxLm:
    model = MlxLm(MlxLm.parse(checkpoint.config, say))
    loaded, dtype = load(checkpoint, dtype, say)
    named = sanitised(model.module, checkpoint.name, loaded)
    arrays = {f"{PREFIX}{name}": array for name, array in named.items()}
    dtype = dtype or main_dtype(arrays)
    layouts = find_layouts(model, arrays)
    if line := contradictions(checkpoint.config, {p.removeprefix(PREFIX): layout for p, layout in layouts.items()}):
        say(line)
    if dequantise:
        arrays = dequantised(arrays, layouts, dtype)
    else:
        pack(model, layouts, dtype)
    place(model, arrays, dtype)
    model.update(tree_unflatten(list(uncast(model.module, arrays).items())))
    say(model.told())
    return model


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


def find_layouts(model: MlxLm, arrays: Mapping[str, mx.array]) -> dict[str, Layout]:
    """The packed modules, stacks of experts among them."""
    modules = dict(model.named_modules())
    layouts: dict[str, Layout] = {}
    for path in [name.removesuffix(".scales") for name in arrays if name.endswith(".scales")]:
        if path not in modules or "weight" not in modules[path]:
            continue  # listed among the leftovers
        parts = {f"{path}.{part}": arrays.get(f"{path}.{part}") for part in ("weight", "scales", "biases")}
        one = {name: a[0] if a.ndim == 3 else a for name, a in parts.items() if a is not None}
        layouts[path] = layout_of(path, modules[path]["weight"].shape[-1], one)
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
