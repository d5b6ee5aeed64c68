"""A model taken apart without its weights: what is stored where, in how many bits, and what running it will need.

Reads headers and outlines; nothing is loaded and nothing computed.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import prod
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..config import EngineConfig
from ..engine.load import DTYPES, is_packed, unpacked_fits
from ..kernels import device
from ..models import CausalLM, find
from ..models.config import unreported
from ..weights import Checkpoint, TensorInfo
from ..weights.formats.gguf.tensors import PACKED
from ..weights.formats.jang.labels import jang_of
from ..weights.formats.quantized import refuse_methods
from ..weights.formats.weight_format import Stored
from ..weights.load.fill import check_depth, in_our_names
from ..weights.load.headers import BESIDE, layouts_told, refuted, told_format
from ..weights.random_models import Shape
from ..weights.randomise import packs
from .memory import SequenceCost

CLASSES = ("embedding", "attention", "mlp", "norm", "head", "other")
STORED = {
    "F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16, "U32": mx.uint32, "U8": mx.uint8,
}  # fmt: skip


@dataclass
class Part:
    """One class of tensors."""

    parameters: int = 0
    nbytes: int = 0
    kinds: Counter[str] = field(default_factory=Counter)  # how its matrices are stored -> how many of them

    def told(self) -> dict[str, Any]:
        bits = 8 * self.nbytes / self.parameters if self.parameters else None
        return {"parameters": self.parameters, "bytes": self.nbytes, "bits": bits, "kinds": dict(self.kinds)}


@dataclass(frozen=True)
class Anatomy:
    model: CausalLM  # an outline in the dtype it would compute in
    parts: dict[str, Part]
    resident: int  # bytes of weights in memory when it runs here
    on_gpu: int  # and on a GPU: packed as stored, floats in two bytes
    dtype: str
    format: dict[str, Any] | None = None  # of a JANG bundle or a codebook
    contradictions: tuple[str, ...] = ()  # between labels and tensors

    @property
    def cost(self) -> SequenceCost:
        return SequenceCost.of(self.model.cache_specs())

    def cost_on_gpu(self, raw: dict[str, Any]) -> SequenceCost:
        return SequenceCost.of(outlined(raw, mx.bfloat16, quiet=True).cache_specs())


def class_of(name: str) -> str:
    """Which class a parameter belongs to, by its name."""
    path = name.split(".")
    if any("norm" in step for step in path[:-1]):  # the last step names a part of it: tq_norms
        return "norm"
    for step, found in (("embed_tokens", "embedding"), ("lm_head", "head"), ("self_attn", "attention"), ("mlp", "mlp")):
        if step in path:
            return found
    return "other"


def outlined(config: dict[str, Any], dtype: mx.Dtype | None, quiet: bool = False) -> CausalLM:
    """The model of a config, its unknown keys told, its weights never computed."""
    family = find(config)
    with unreported() if quiet else nullcontext():
        model = family(family.parse(config))  # type: ignore[call-arg]
    if dtype is not None:
        model.set_dtype(dtype)
    return model


def word(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


def flat(model: nn.Module) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))  # type: ignore[arg-type]


def of_checkpoint(checkpoint: Checkpoint, config: EngineConfig) -> Anatomy:
    family = find(checkpoint.config)
    refuse_methods(checkpoint.config)
    if not family.adapted:
        check_depth(checkpoint, family.rename)
    sizes = {family.rename(name): info for name, info in checkpoint.sizes().items()}
    bundle = jang_of(checkpoint.config)
    dtype = compute_dtype(config, sizes.values(), family)
    model = outlined(checkpoint.config, dtype)
    parameters = flat(model)
    if unpacks(checkpoint, config, dtype):
        resident = sum(array.nbytes for array in parameters.values())
    else:
        resident = sum(in_memory(info, dtype) for info in sizes.values())
    on_gpu = sum(in_memory(info, mx.bfloat16) for info in sizes.values())
    found = layouts_told({name: array.shape for name, array in parameters.items()}, sizes, bundle)
    named = in_our_names(checkpoint.config, family.rename)
    told = told_format(found, bundle), tuple(refuted(found, named, bundle))
    return Anatomy(model, measured(parameters, sizes, found), resident, on_gpu, word(dtype), *told)


def in_memory(info: TensorInfo, dtype: mx.Dtype) -> int:
    """Bytes of a stored tensor that is not unpacked on purpose: floats are cast, GGUF kinds unknown to MLX unpacked."""
    return info.nbytes if info.dtype in ("U32", "U8", *PACKED) else prod(info.shape) * dtype.size


def compute_dtype(config: EngineConfig, infos: Iterable[TensorInfo], family: type[CausalLM] = CausalLM) -> mx.Dtype:
    """As loading chooses it. GGUF blocks but MXFP4's become float16, or codes with scales in it."""
    if config.dtype:
        return DTYPES[config.dtype]
    if device.kind() == "cpu":
        return mx.float32
    held: Counter[str] = Counter()
    for info in infos:
        kind = "F16" if info.dtype.startswith(("Q", "IQ", "TQ")) else info.dtype
        held[kind] += info.nbytes if kind in ("F32", "F16", "BF16") else 0
    found = STORED[held.most_common(1)[0][0]] if held.total() else mx.float16
    return mx.bfloat16 if found == mx.float16 and family.OUTGROWS_HALF else found


def unpacks(checkpoint: Checkpoint, config: EngineConfig, dtype: mx.Dtype) -> bool:
    if not is_packed(checkpoint):
        return False
    if config.dequantise is not None:
        return config.dequantise
    return device.kind() == "cpu" and unpacked_fits(checkpoint, dtype)


def measured(
    parameters: Mapping[str, mx.array], sizes: Mapping[str, TensorInfo], found: Mapping[str, Stored | str]
) -> dict[str, Part]:
    parts = {name: Part() for name in CLASSES}
    for name, array in parameters.items():
        parts[class_of(name)].parameters += array.size
    for name, info in sizes.items():
        part = parts[class_of(name)]
        part.nbytes += info.nbytes
        if not name.endswith(BESIDE):
            part.kinds[str(found.get(name, info.dtype))] += 1
    return {name: part for name, part in parts.items() if part.parameters or part.nbytes}


def of_shape(shape: Shape, config: EngineConfig) -> Anatomy:
    chosen = (lambda _, module: packs(module, shape.group_size)) if shape.bits is not None else None
    return of_outline(shape.config, config, shape, chosen)


def of_config(raw: dict[str, Any], config: EngineConfig) -> Anatomy:
    """A config.json without weights, as it would be stored in the bits it names."""
    said = raw.get("quantization") or raw.get("quantization_config") or {}
    said = said if isinstance(said, dict) else {}
    method, bits, group = said.get("quant_method"), said.get("bits"), said.get("group_size", 64)
    if method == "mxfp4":  # gpt-oss: the experts alone
        shape = Shape("", 4, "mxfp4", 32)
        return of_outline(raw, config, shape, lambda _, module: packs(module, 32) and module["weight"].ndim == 3)
    if bits in (2, 3, 4, 5, 6, 8) and group in (32, 64, 128) and method is None:
        shape = Shape("", bits, said.get("mode", "affine"), group)
        return of_outline(raw, config, shape, lambda _, module: packs(module, group))
    return of_outline(raw, config, Shape(""), None)


def of_outline(raw: dict[str, Any], config: EngineConfig, shape: Shape, chosen: Any) -> Anatomy:
    dtype = compute_dtype(config, []) if config.dtype or device.kind() == "cpu" else mx.bfloat16
    model, stored = outlined(raw, dtype), outlined(raw, dtype, quiet=True)
    if chosen is not None and shape.bits is not None:
        nn.quantize(stored, shape.group_size, shape.bits, mode=shape.mode, class_predicate=chosen)
    named = {dtype: name for name, dtype in STORED.items()}
    sizes = {name: TensorInfo(array.shape, named[array.dtype], array.nbytes) for name, array in flat(stored).items()}
    resident = sum(info.nbytes for info in sizes.values())
    on_gpu = sum(in_memory(info, mx.bfloat16) for info in sizes.values())
    found = layouts_told({name: array.shape for name, array in flat(model).items()}, sizes, None)
    return Anatomy(model, measured(flat(model), sizes, found), resident, on_gpu, word(dtype))
