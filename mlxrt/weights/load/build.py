"""Builds the model of a checkpoint: our own module of the family, or mlx-lm's where there is none."""

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ...errors import quote
from ...kernels.dtypes import HALVES
from ...kernels.ops.quantized import CPU_BITS
from ...models import CausalLM, find
from ...models.pack_modules import is_plain_layer
from ..formats.checkpoint import Checkpoint
from ..formats.fp8 import has_fp8, unpack_fp8
from ..formats.gguf.k_quants import KQuantFormat, SplitFormat
from ..formats.jang import labels as jang
from ..formats.quantized import MLXFormat, contradictions, refuse_methods
from ..formats.weight_format import WeightFormat
from .assign import (
    Arrays,
    assign,
    check_depth,
    dequantize,
    load_tensors,
    rename_quantized_modules,
    select_dtype,
    select_tensors,
    without_formats,
)
from .detect import Hints, detect_formats
from .mlx_lm import build_mlx_lm

log = logging.getLogger("mlxrt")

HEAD, EMBEDDING = "lm_head.", "embed_tokens."


def build(
    checkpoint: Checkpoint, *, dtype: mx.Dtype | None = None, dequantise: bool = False, keep_scales: bool = False
) -> CausalLM:
    """The model of a checkpoint with its weights in memory; `dequantise` unpacks quantised matrices.

    `keep_scales`: those of affine matrices, and plain matrices of 16 bits, stay as they are stored, for kernels that
    read them with any activations.
    """
    family = find(checkpoint.config)
    refuse_methods(checkpoint.config)
    if family.is_adapter:
        return build_mlx_lm(checkpoint, dtype=dtype, dequantise=dequantise)
    return build_native(family, checkpoint, dtype, dequantise, keep_scales)


@dataclass
class NativeTensors:
    """A checkpoint in the layout of our own module: tensors, which are read when they are used, and their formats."""

    model: CausalLM
    arrays: Arrays
    formats: dict[str, WeightFormat]  # of quantised modules, by path
    dtype: mx.Dtype
    hints: Hints


def read_native(family: type[CausalLM], checkpoint: Checkpoint, dtype: mx.Dtype | None = None) -> NativeTensors:
    """Open a checkpoint of one of our own families."""
    config = family.parse(checkpoint.config)
    check_depth(checkpoint, family.rename)
    model = family(config)  # type: ignore[call-arg]  # every family takes its config; nn.Module takes nothing
    loaded, dtype = load_tensors(checkpoint, dtype, family)
    labels = jang.read_labels(checkpoint.config)
    arrays = select_tensors(family, loaded, jang.IGNORED_TENSORS if labels else ())
    if has_fp8(arrays):
        dtype = dtype or select_dtype(family, arrays)
        arrays = unpack_fp8(arrays, checkpoint.config, dtype)
    arrays = family.sanitize(config, arrays)
    drop_tied_head(model, arrays)
    dtype = dtype or select_dtype(family, arrays)
    hints = Hints(rename_quantized_modules(checkpoint.config, family.rename), labels)
    return NativeTensors(model, arrays, detect_formats(model, arrays, hints), dtype, hints)


def build_native(
    family: type[CausalLM], checkpoint: Checkpoint, dtype: mx.Dtype | None, dequantise: bool, keep_scales: bool = False
) -> CausalLM:
    """`build` for one of our own families."""
    found = read_native(family, checkpoint, dtype)
    model, formats, dtype = found.model, found.formats, found.dtype
    for line in label_contradictions(found.hints, formats):
        log.warning(line)
    unpacked = formats if dequantise else embeddings_to_unpack(model, formats)
    arrays = dequantize(found.arrays, unpacked, dtype)
    quantized = {path: fmt for path, fmt in formats.items() if path not in unpacked}
    ready = replace_modules(model, arrays, quantized, dtype)
    keep = scales_to_keep(model, quantized, ready) if keep_scales else frozenset()
    keep |= {f"{path}.scales" for path, fmt in quantized.items() if isinstance(fmt, SplitFormat)}
    if keep_scales:
        keep |= halves_to_keep(model, ready)
    assign(model, ready, dtype, keep)
    return model


def scales_to_keep(model: nn.Module, formats: Mapping[str, WeightFormat], arrays: Arrays) -> frozenset[str]:
    """Scales and biases of plain affine matrices that have one dtype."""
    modules, kept = dict(model.named_modules()), set()
    for path, fmt in formats.items():
        names = [f"{path}.scales", f"{path}.biases"]
        plain = type(modules[path]) is nn.QuantizedLinear or isinstance(modules[path], nn.QuantizedEmbedding)
        if type(fmt) is MLXFormat and fmt.mode == "affine" and fmt.bits in CPU_BITS and plain:
            kept |= set(names) if len({arrays[name].dtype for name in names}) == 1 else set()
    return frozenset(kept)


def halves_to_keep(model: CausalLM, arrays: Arrays) -> set[str]:
    """Plain matrices of 16 bits that CPU kernels read as they are."""
    names = {f"{path}.weight" for path, module in model.named_modules() if is_plain_layer(module)}
    wide = re.compile("|".join(model.KEEP_FP32) or "(?!)")  # (?!) matches nothing
    return {name for name in names if name in arrays and arrays[name].dtype in HALVES and not wide.search(name)}


def label_contradictions(hints: Hints, formats: Mapping[str, WeightFormat]) -> Iterable[str]:
    """A line for everything that config.json or JANG labels claim and the tensors contradict."""
    if line := contradictions(hints.config, {path: x for path, x in formats.items() if isinstance(x, MLXFormat)}):
        yield line
    if hints.jang is not None:
        yield from hints.jang.contradictions(formats)


def embeddings_to_unpack(model: nn.Module, formats: Mapping[str, WeightFormat]) -> dict[str, WeightFormat]:
    """Embeddings in formats that have no embedding module."""
    modules = dict(model.named_modules())
    found = {
        p: x
        for p, x in formats.items()
        if isinstance(modules[p], nn.Embedding) and not isinstance(x, MLXFormat | KQuantFormat)
    }
    for path, fmt in found.items():
        log.info(f"{path} is {fmt}, for which there is no embedding: it is dequantised")
    return found


def drop_tied_head(model: nn.Module, arrays: Arrays) -> None:
    """Drop a stored head when the model uses the embedding, as other loaders do; a line where the two differ."""
    head = {name: array for name, array in arrays.items() if name.startswith(HEAD)}
    if not head or "lm_head" in model:
        return
    [embedding] = [path for path, _ in model.named_modules() if f"{path}.".endswith(EMBEDDING)] or [""]
    differing = []
    for name, array in head.items():
        other = arrays.get(f"{embedding}.{name.removeprefix(HEAD)}")
        if other is None or other.shape != array.shape or not mx.array_equal(other, array, equal_nan=True).item():
            differing.append(name)
        del arrays[name]
    if differing:
        log.warning(
            f"config.json ties the head to the embedding: the checkpoint's {quote(differing[0])}, which differs from "
            f"{embedding}, is not used; set tie_word_embeddings to false if it is meant to be"
        )


def replace_modules(model: nn.Module, arrays: Arrays, formats: Mapping[str, WeightFormat], dtype: mx.Dtype) -> Arrays:
    """Replace linears and embeddings by modules that compute with the formats; the tensors under their names."""
    modules = dict(model.named_modules())
    made = [(path, fmt.build_module(modules[path], dtype)) for path, fmt in formats.items()]
    model.update_modules(tree_unflatten(made))
    named = {f"{p}.{name}": a for p, x in formats.items() for name, a in x.module_tensors(p, arrays).items()}
    return without_formats(arrays, formats) | named
