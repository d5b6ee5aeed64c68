"""Inspects a model without its weights, and this machine: what is stored in how many bits, what running it needs.

Reads headers and model outlines; nothing is loaded or computed.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .. import __version__, _openblas
from ..bench.token_cost import grows
from ..cache.memory import ExternalKV, LayerSpec, Shared
from ..config import EngineConfig
from ..engine.cpu_kernels import suits_cpu_kernels
from ..engine.load_plan import STORED_DTYPES, choose_dtype, compute_dtype, plan_checkpoint
from ..engine.weight_size import loaded_bytes, make_outline, parameters
from ..kernels import device
from ..models import CausalLM, find
from ..weights import Checkpoint, TensorInfo
from ..weights.formats.jang.labels import read_labels
from ..weights.formats.quantized import refuse_methods
from ..weights.formats.weight_format import WeightFormat
from ..weights.load.assign import check_depth, rename_quantized_modules
from ..weights.load.detect import COMPANIONS, describe_jang, formats_from_headers, header_contradictions
from ..weights.random_models import Shape, is_quantizable

MACS = (16, 32, 64, 128)  # GB of unified memory
GPU_SHARE = {16: 2 / 3, 32: 2 / 3, 64: 3 / 4, 128: 3 / 4}  # of it that macOS lets a GPU use
PARAMETER_CLASSES = ("embedding", "attention", "mlp", "norm", "head", "other")


@dataclass
class ParameterClass:
    """Size and storage of one class of parameters."""

    parameters: int = 0
    nbytes: int = 0
    kinds: Counter[str] = field(default_factory=Counter)  # storage format -> number of tensors

    def to_dict(self) -> dict[str, Any]:
        bits = 8 * self.nbytes / self.parameters if self.parameters else None
        return {"parameters": self.parameters, "bytes": self.nbytes, "bits": bits, "kinds": dict(self.kinds)}


@dataclass(frozen=True)
class ModelReport:
    """What a model is made of and how much memory its weights take."""

    model: CausalLM  # an outline in the compute dtype, without weights
    parts: dict[str, ParameterClass]
    resident: int  # bytes of weights in memory when it runs here
    on_gpu: int  # bytes on a GPU: packed as stored, floats in two bytes
    dtype: str
    format: dict[str, Any] | None = None  # of a JANG or codebook checkpoint
    contradictions: tuple[str, ...] = ()  # between labels and tensors

    @property
    def kv_cost(self) -> "KVCost":
        return KVCost.of(self.model.cache_specs())

    def kv_cost_on_gpu(self, raw: dict[str, Any]) -> "KVCost":
        return KVCost.of(make_outline(raw, mx.bfloat16).cache_specs())


def classify(name: str) -> str:
    """The class of a parameter, by its name."""
    path = name.split(".")
    if any("norm" in step for step in path[:-1]):  # the last step names a part of it: tq_norms
        return "norm"
    for step, found in (("embed_tokens", "embedding"), ("lm_head", "head"), ("self_attn", "attention"), ("mlp", "mlp")):
        if step in path:
            return found
    return "other"


def report_outline(config: dict[str, Any], dtype: mx.Dtype) -> CausalLM:
    """The outline of a model, with the config's unknown keys logged."""
    family = find(config)
    model = family(family.parse(config))  # type: ignore[call-arg]
    model.set_dtype(dtype)
    return model


def dtype_name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


def inspect_checkpoint(checkpoint: Checkpoint, config: EngineConfig) -> ModelReport:
    family = find(checkpoint.config)
    refuse_methods(checkpoint.config)
    if not family.is_adapter:
        check_depth(checkpoint, family.rename)
    sizes = {family.rename(name): info for name, info in checkpoint.sizes().items()}
    jang = read_labels(checkpoint.config)
    dtype = choose_dtype(config, sizes.values(), family)
    model = report_outline(checkpoint.config, dtype)
    arrays = parameters(model)
    resident = plan_checkpoint(checkpoint, config).weights
    on_gpu = sum(loaded_bytes(info, mx.bfloat16) for info in sizes.values())
    found = formats_from_headers({name: array.shape for name, array in arrays.items()}, sizes, jang)
    labels = rename_quantized_modules(checkpoint.config, family.rename)
    format = describe_jang(found, jang), tuple(header_contradictions(found, labels, jang))
    return ModelReport(model, count_parameters(arrays, sizes, found), resident, on_gpu, dtype_name(dtype), *format)


def count_parameters(
    arrays: Mapping[str, mx.array], sizes: Mapping[str, TensorInfo], found: Mapping[str, WeightFormat | str]
) -> dict[str, ParameterClass]:
    parts = {name: ParameterClass() for name in PARAMETER_CLASSES}
    for name, array in arrays.items():
        parts[classify(name)].parameters += array.size
    for name, info in sizes.items():
        part = parts[classify(name)]
        part.nbytes += info.nbytes
        if not name.endswith(COMPANIONS):
            part.kinds[str(found.get(name, info.dtype))] += 1
    return {name: part for name, part in parts.items() if part.parameters or part.nbytes}


def inspect_shape(shape: Shape, config: EngineConfig) -> ModelReport:
    predicate = (lambda _, module: is_quantizable(module, shape.group_size)) if shape.bits is not None else None
    return inspect_outline(shape.config, config, shape, predicate)


def inspect_config(raw: dict[str, Any], config: EngineConfig) -> ModelReport:
    """A config.json without weights, quantised as it says."""
    quantization = raw.get("quantization") or raw.get("quantization_config") or {}
    quantization = quantization if isinstance(quantization, dict) else {}
    method, bits = quantization.get("quant_method"), quantization.get("bits")
    group = quantization.get("group_size", 64)
    if method == "mxfp4":  # gpt-oss: the experts only
        experts = lambda _, module: is_quantizable(module, 32) and module["weight"].ndim == 3  # noqa: E731
        return inspect_outline(raw, config, Shape("", 4, "mxfp4", 32), experts)
    if bits in (2, 3, 4, 5, 6, 8) and group in (32, 64, 128) and method is None:
        shape = Shape("", bits, quantization.get("mode", "affine"), group)
        return inspect_outline(raw, config, shape, lambda _, module: is_quantizable(module, group))
    return inspect_outline(raw, config, Shape(""), None)


def inspect_outline(raw: dict[str, Any], config: EngineConfig, shape: Shape, predicate: Any) -> ModelReport:
    dtype = compute_dtype(config.dtype, mx.bfloat16)
    model, stored = report_outline(raw, dtype), make_outline(raw, dtype)
    if predicate is not None and shape.bits is not None:
        nn.quantize(stored, shape.group_size, shape.bits, mode=shape.mode, class_predicate=predicate)
    names = {dtype: name for name, dtype in STORED_DTYPES.items()}
    sizes = {
        name: TensorInfo(array.shape, names[array.dtype], array.nbytes) for name, array in parameters(stored).items()
    }
    resident = sum(info.nbytes for info in sizes.values())
    on_gpu = sum(loaded_bytes(info, mx.bfloat16) for info in sizes.values())
    arrays = parameters(model)
    found = formats_from_headers({name: array.shape for name, array in arrays.items()}, sizes, None)
    return ModelReport(model, count_parameters(arrays, sizes, found), resident, on_gpu, dtype_name(dtype))


@dataclass(frozen=True)
class KVCost:
    """What one sequence's cache costs: layer specs and how many layers have each."""

    groups: tuple[tuple[LayerSpec, int], ...]

    @classmethod
    def of(cls, specs: list[LayerSpec | Shared]) -> "KVCost":
        return cls(tuple(Counter(s for s in specs if not isinstance(s, Shared)).items()))

    @property
    def per_token(self) -> float:
        """Bytes per token over all layers, while no window is full."""
        return sum(n * s.nbytes() / s.size for s, n in self.groups if grows(s))

    def nbytes(self, tokens: int) -> float:
        """Bytes of a sequence of `tokens` tokens."""
        return sum(n * layer_bytes(s, tokens) for s, n in self.groups)

    def max_context(self, memory: float, limit: int) -> int:
        """The longest sequence that fits, in tokens."""
        if self.nbytes(1) > memory:
            return 0
        low, high = 1, limit
        while low < high:  # the largest that fits lies in low..high
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.nbytes(middle) <= memory else (low, middle - 1)
        return low

    def to_list(self) -> list[dict[str, Any]]:
        return [group_to_dict(s, n) for s, n in self.groups]

    def max_context_on_macs(self, weights: int, limit: int) -> dict[str, int]:
        """The longest context on Macs of these sizes, with all GPU memory for the weights and one sequence."""
        free = {gb: GPU_SHARE[gb] * gb * 2**30 - weights for gb in MACS}
        return {f"{gb} GB": self.max_context(memory, limit) for gb, memory in free.items()}


def layer_bytes(spec: Any, tokens: int) -> float:
    if not grows(spec):
        return spec.nbytes()
    held = tokens if spec.window is None else min(tokens, spec.window)
    return held * spec.nbytes() / spec.size


def group_to_dict(spec: Any, layers: int) -> dict[str, Any]:
    if isinstance(spec, ExternalKV):
        per_token = spec.nbytes() / spec.size if spec.grows else 0.0
        return {"kind": "mlx-lm's caches", "layers": "all", "bytes_per_token": per_token}
    if not spec.paged:
        return {"kind": "state", "layers": layers, "bytes_per_sequence": layers * spec.nbytes()}
    kind = "full" if spec.window is None else f"window {spec.window}"
    return {"kind": kind, "layers": layers, "bytes_per_token": layers * spec.nbytes() / spec.size}


def describe_kernels() -> str:
    """What computes here. Whether the CPU's kernels compile is `doctor`'s to tell: it takes seconds."""
    if device.backend() != "cpu":
        return "mlxrt's own where they fit, else plain MLX"
    own = "mlxrt's own for packed weights (mlxrt doctor tries them), else " if suits_cpu_kernels(EngineConfig()) else ""
    return f"{own}plain MLX: no GPU"


def inspect_machine() -> dict[str, Any]:
    total, free = device.memory()
    kind = device.backend()
    found = {
        "mlxrt": __version__,
        "mlx": version("mlx"),
        "device": kind,
        "device_name": str(mx.device_info().get("device_name", "")) or kind,
        "memory_bytes": total,
        "free_bytes": free,
        "kernels": describe_kernels(),
    }
    return found | ({"blas": _openblas.running()} if kind == "cpu" else {})
