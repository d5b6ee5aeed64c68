"""The plan of a load: dtype, packed or not, bytes of the weights. From headers, before a weight is read.

What a model and its options cannot do, or what does not fit the memory, is refused here; loading it first would take
minutes and the memory that is not there.
"""

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import mlx.core as mx

from ..cache.memory import Shared, apply_kv_options, size_pools
from ..config import EngineConfig, nbytes
from ..errors import WontFit
from ..kernels import device
from ..kernels.dtypes import DTYPES
from ..models import CausalLM, find
from ..weights import Checkpoint, TensorInfo
from ..weights.formats.jang.labels import read_labels
from ..weights.formats.quantized import refuse_methods
from ..weights.load.assign import check_depth
from ..weights.random_models import Shape
from .check_config import check_disk_cache
from .cpu_kernels import open_cpu_kernels, suits_cpu_kernels
from .memory import choose_context, max_chunk_size, plan_memory, weight_bytes
from .weight_size import (
    FLOATS,
    HALVES,
    check_weights_fit,
    checkpoint_bytes,
    cpu_kernels_read,
    make_outline,
    shape_bytes,
)

log = logging.getLogger("mlxrt")

STORED_DTYPES = {
    "F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16, "U32": mx.uint32, "U8": mx.uint8,
}  # fmt: skip
MAX_UNPACKED = 0.7  # of the free memory, for plain matrices in place of packed ones


@dataclass(frozen=True)
class LoadPlan:
    """How the weights of a model will be held."""

    name: str
    outline: CausalLM  # in the compute dtype, its weights never computed
    dequantise: bool
    weights: int  # bytes in memory
    packed: int  # bytes if they stay packed; the same where nothing is

    @property
    def dtype(self) -> mx.Dtype:
        return self.outline.dtype


def compute_dtype(name: str | None, on_gpu: mx.Dtype) -> mx.Dtype:
    """The dtype a model computes in: the one asked for, else float32 on a CPU and `on_gpu` elsewhere."""
    return DTYPES[name] if name else (mx.float32 if device.backend() == "cpu" else on_gpu)


def choose_dtype(config: EngineConfig, infos: Iterable[TensorInfo], family: type[CausalLM] = CausalLM) -> mx.Dtype:
    """The dtype that loading chooses, from the headers. GGUF types other than MXFP4 are loaded with float16 scales."""
    held: Counter[str] = Counter()
    for info in infos:
        kind = "F16" if info.dtype.startswith(("Q", "IQ", "TQ")) else info.dtype
        held[kind] += info.nbytes if kind in ("F32", "F16", "BF16") else 0
    stored = STORED_DTYPES[held.most_common(1)[0][0]] if held.total() else mx.float16
    return compute_dtype(config.dtype, mx.bfloat16 if stored == mx.float16 and family.NEEDS_BF16 else stored)


def is_packed(checkpoint: Checkpoint) -> bool:
    return not all(info.dtype in FLOATS for info in checkpoint.sizes().values())


def has_halves(checkpoint: Checkpoint) -> bool:
    """Whether it has floats of 16 bits."""
    return any(info.dtype in HALVES for info in checkpoint.sizes().values())


def plan_checkpoint(checkpoint: Checkpoint, config: EngineConfig, suppose_kernels: bool = False) -> LoadPlan:
    """`suppose_kernels`: that CPU kernels compile where they apply, without compiling them now."""
    family = find(checkpoint.config)
    refuse_methods(checkpoint.config)
    if not family.is_adapter:
        check_depth(checkpoint, family.rename)
    sizes = checkpoint.sizes()
    outline = make_outline(checkpoint.config, choose_dtype(config, sizes.values(), family))
    plain = weight_bytes(outline)
    on_cpu = uses_cpu_kernels(checkpoint, config, suppose_kernels)
    if not is_packed(checkpoint):
        held = min(plain, checkpoint_bytes(checkpoint, outline.dtype, False, on_cpu=True)) if on_cpu else plain
        return LoadPlan(checkpoint.name, outline, False, held, held)
    packed = checkpoint_bytes(checkpoint, outline.dtype, False, on_cpu, device.backend() != "cpu")
    plan = LoadPlan(checkpoint.name, outline, True, plain, packed)
    if config.dequantise is None:
        stays = device.backend() != "cpu" or (on_cpu and cpu_kernels_read(checkpoint) and not has_labels(checkpoint))
        unpacks = not stays and unpacked_fits(plan, config)
    else:
        unpacks = config.dequantise
    return plan if unpacks else replace(plan, dequantise=False, weights=packed)


def confirm_plan(plan: LoadPlan, checkpoint: Checkpoint, config: EngineConfig) -> LoadPlan:
    """A plan that supposed CPU kernels, once they are compiled; where they cannot be, another one, checked again."""
    if uses_cpu_kernels(checkpoint, config) == uses_cpu_kernels(checkpoint, config, True):
        return plan
    plan = plan_checkpoint(checkpoint, config)
    check_plan(plan, config)
    return plan


def uses_cpu_kernels(checkpoint: Checkpoint, config: EngineConfig, suppose: bool = False) -> bool:
    """Whether CPU kernels compute the matrices that are packed or of 16 bits, should they stay so."""
    if not is_packed(checkpoint) and not has_halves(checkpoint):
        return False
    if config.dequantise or find(checkpoint.config).is_adapter or not suits_cpu_kernels(config):
        return False
    return suppose or open_cpu_kernels(config) is not None


def has_labels(checkpoint: Checkpoint) -> bool:
    """Of JANG, which may say that a matrix is rotated, or of another quantiser whose matrices are repacked."""
    own = "quantization" in checkpoint.config
    quantization = {} if own else checkpoint.config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    return read_labels(checkpoint.config) is not None or method not in (None, "mxfp4")


def unpacked_fits(plan: LoadPlan, config: EngineConfig) -> bool:
    """Whether plain matrices leave room for the rest. Half-precision and packed matmuls crawl on a CPU."""
    _, free = device.memory()
    if plan.weights >= MAX_UNPACKED * free:
        reason = f"{free / 1e9:.1f} GB free"
    elif config.memory is not None and not fits_limit(plan, config):
        reason = f"memory {nbytes(config.memory) / 1e9:.1f} GB"
    else:
        return True
    log.info(f"{plan.name}: {plan.weights / 1e9:.1f} GB unpacked do not fit {reason}; weights stay packed (slow)")
    return False


def fits_limit(plan: LoadPlan, config: EngineConfig) -> bool:
    try:
        check_memory(plan, config)
    except WontFit:
        return False
    return True


def plan_shape(shape: Shape, config: EngineConfig) -> LoadPlan:
    outline = make_outline(shape.config, compute_dtype(config.dtype, mx.bfloat16))
    weights = shape_bytes(shape, outline.dtype)
    return LoadPlan(f"shape:{shape.name}", outline, False, weights, weights)


def check_plan(plan: LoadPlan, config: EngineConfig) -> None:
    """Refuse options that do not apply to the model, and weights that do not fit."""
    own = plan.outline.config.context
    choose_context(own, config.max_context, own)
    if config.disk_cache is not None:
        check_disk_cache(spec for spec in plan.outline.cache_specs() if not isinstance(spec, Shared))
    check_memory(plan, config)


def check_memory(plan: LoadPlan, config: EngineConfig) -> None:
    specs = apply_kv_options(plan.outline.cache_specs(), config.kv, config.max_kv_size, plan.dtype, quiet=True)
    limited = config.memory is not None or config.kv_memory is not None  # else what is free decides, after loading
    try:
        check_weights_fit(plan.name, plan.weights, config)
        chunk = config.chunk or max_chunk_size(plan.outline)
        memory = plan_memory(plan.outline, specs, config, chunk, plan.weights) if limited else None
    except WontFit as error:
        packed = f"; packed (dequantise off) they take {plan.packed}" if plan.packed < plan.weights else ""
        raise WontFit(f"{error}{packed}") from None
    if memory is not None:
        fits = size_pools(specs, memory.kv, config.max_running, memory.chunk).fits
        choose_context(plan.outline.config.context, config.max_context, fits)
