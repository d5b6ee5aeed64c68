"""Builds a model that mlx-lm computes: tensor names come from its module's own `sanitize`.

No architecture is known here. A missing or unexpected tensor is an error, as for our own models.
"""

import logging
import re
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ...errors import BadCheckpoint, UnsupportedModel, quote
from ...models.mlx_lm_adapter import CUT_DEPENDENT, REFUSALS, MlxLm
from ..formats.checkpoint import Checkpoint
from ..formats.hadamard import HadamardFormat, with_input_transform
from ..formats.jang.labels import IGNORED_TENSORS, read_labels
from ..formats.quantized import MLXFormat, QuantizedEmbedding, contradictions, detect_mlx
from ..formats.weight_format import WeightFormat
from .assign import Arrays, assign, dequantize, load_tensors, main_dtype

log = logging.getLogger("mlxrt")

PREFIX = "module."
LUT_SUFFIXES = (".tq_packed", ".tq2_packed", ".jt_packed", ".codes")  # only our own modules compute with these


def build_mlx_lm(checkpoint: Checkpoint, *, dtype: mx.Dtype | None, dequantise: bool) -> MlxLm:
    model = MlxLm(MlxLm.parse(checkpoint.config))
    loaded, dtype = load_tensors(checkpoint, dtype)
    loaded = check_tensors(checkpoint, loaded)
    sanitized = sanitize(model.module, checkpoint.name, loaded)
    arrays = {f"{PREFIX}{name}": array for name, array in sanitized.items()}
    dtype = dtype or main_dtype(arrays)
    labels = read_labels(checkpoint.config)
    formats = detect_formats(model, arrays, hadamard=labels is not None and labels.hadamard)
    mlx = {path: fmt for path, fmt in formats.items() if isinstance(fmt, MLXFormat)}
    if line := contradictions(checkpoint.config, {p.removeprefix(PREFIX): fmt for p, fmt in mlx.items()}):
        log.warning(line)
    if unpacked := formats if dequantise else {p: x for p, x in formats.items() if isinstance(x, HadamardFormat)}:
        if not dequantise:
            log.info(
                f"{len(unpacked)} matrices are {unpacked[min(unpacked)]}, which mlx-lm's modules do not support: "
                "they are dequantised"
            )
        arrays = dequantize(arrays, unpacked, dtype)
    quantize_modules(model, {path: fmt for path, fmt in mlx.items() if path not in unpacked}, dtype)
    assign(model, arrays, dtype)
    model.update(tree_unflatten(list(uncast(model.module, arrays).items())))
    log.log(logging.WARNING if model.config.model_type in CUT_DEPENDENT else logging.INFO, model.describe())
    return model


def check_tensors(checkpoint: Checkpoint, arrays: Arrays) -> Arrays:
    """The tensors without JANG's extras; an error where mlx-lm's module cannot compute with them."""
    if lut := sorted(name for name in arrays if name.endswith(LUT_SUFFIXES)):
        raise UnsupportedModel(
            f"{quote(lut[0])} is JANGTQ or codebook VQ, and {quote(checkpoint.config.get('model_type'))} is "
            "computed by mlx-lm's module, which has no such layers; take an affine JANG or MLX version"
        )
    if read_labels(checkpoint.config) is None:
        return arrays
    check_multipliers(checkpoint, arrays)
    return {n: a for n, a in arrays.items() if not any(re.search(pattern, n) for pattern, _ in IGNORED_TENSORS)}


def check_multipliers(checkpoint: Checkpoint, arrays: Arrays) -> None:
    """mlx-lm folds muP's multipliers into weights whose convolutions have the original layout; JANG may have too.

    Exactly one of both must; which one only JANG's flag and the shape tell.
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
            f"{checkpoint.name}: {quote(factors[0])} would be applied {what}: config.json "
            f"{'has' if folded else 'lacks'} jang_mup_folded; take a checkpoint of a newer converter"
        )


def sanitize(module: nn.Module, name: str, arrays: Arrays) -> Arrays:
    """The checkpoint's tensors under the module's names."""
    rename = getattr(module, "sanitize", None)  # as mlx-lm does: not every module has one
    if rename is None:
        return arrays
    try:
        return rename(arrays)
    except REFUSALS as bad:
        raise BadCheckpoint(
            f"{name}: mlx-lm cannot sanitize the tensors ({type(bad).__name__}: {str(bad)[:120]}); "
            "some are missing or have another shape than it expects"
        ) from None


def uncast(module: nn.Module, arrays: Arrays) -> Arrays:
    """The tensors that mlx-lm does not cast when it changes a model's dtype."""
    casts = getattr(module, "cast_predicate", None)
    return {n: a for n, a in arrays.items() if not casts(n.removeprefix(PREFIX))} if casts is not None else {}


def detect_formats(model: MlxLm, arrays: Mapping[str, mx.array], *, hadamard: bool) -> dict[str, WeightFormat]:
    """The quantised modules, stacks of experts among them."""
    modules = dict(model.named_modules())
    formats: dict[str, WeightFormat] = {}
    for path in [name.removesuffix(".scales") for name in arrays if name.endswith(".scales")]:
        if path not in modules or "weight" not in modules[path]:
            continue  # `assign` reports it
        parts = {f"{path}.{part}": arrays.get(f"{path}.{part}") for part in ("weight", "scales", "biases")}
        one = {name: a[0] if a.ndim == 3 else a for name, a in parts.items() if a is not None}
        shape = modules[path]["weight"].shape
        fmt = detect_mlx(path, shape[-1], one)
        formats[path] = with_input_transform(path, shape, fmt, arrays, hadamard=hadamard)
    return formats


def quantize_modules(model: MlxLm, formats: Mapping[str, MLXFormat], dtype: mx.Dtype) -> None:
    def choose(path: str, module: nn.Module) -> bool | dict[str, Any]:
        fmt = formats.get(path)
        if fmt is None or isinstance(module, nn.Embedding):
            return False
        return {"group_size": fmt.group_size, "bits": fmt.bits, "mode": fmt.mode}

    embeddings = {p: m for p, m in model.named_modules() if p in formats and isinstance(m, nn.Embedding)}
    nn.quantize(model, class_predicate=choose)
    for path, embedding in embeddings.items():
        owner, _, leaf = path.rpartition(".")
        rows, width = embedding["weight"].shape
        dict(model.named_modules())[owner][leaf] = QuantizedEmbedding(rows, width, formats[path], dtype)
