"""How many bytes a model's weights take once loaded, from headers and configs alone; and whether they fit the device.

Asked before anything is allocated: CUDA's unified memory would take more than the device has and then crawl, and a
device that is full in the middle of loading leaves little to say.
"""

import re
from math import prod
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..config import EngineConfig, nbytes
from ..errors import WontFit
from ..kernels import device
from ..kernels.ops.quantized import K_QUANTS
from ..models import CausalLM, find
from ..models.config import suppress_reports
from ..weights import Checkpoint, TensorInfo
from ..weights.formats.gguf.tensors import PACKED
from ..weights.random_models import Shape, is_quantizable

KEPT = ("U32", "I32", "U16", "U8", "I8", *PACKED)  # dtypes of packed tensors: loaded as they are
AFFINE = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}  # of them, those with scales that are cast -> bits
UNPACKED_BYTES = 2  # of a weight whose stored type is unpacked at load and no dtype was asked for


def build_skeleton(config: dict[str, Any]) -> CausalLM:
    """The model of a config, its weights never computed."""
    family = find(config)
    with suppress_reports():
        return family(family.parse(config))  # type: ignore[call-arg]


def count_parameters(model: CausalLM) -> int:
    return sum(array.size for array in parameters(model).values())


def parameters(model: nn.Module) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))  # type: ignore[arg-type]


def make_outline(config: dict[str, Any], dtype: mx.Dtype) -> CausalLM:
    """The model of a config with lazy weights of a dtype that are never computed."""
    model = build_skeleton(config)
    model.set_dtype(dtype)
    return model


def make_shape_outline(shape: Shape, dtype: mx.Dtype) -> CausalLM:
    """The same with the packed matrices of a shape."""
    model = make_outline(shape.config, dtype)
    if shape.bits is not None:
        chosen = lambda _, module: is_quantizable(module, shape.group_size)  # noqa: E731
        nn.quantize(model, shape.group_size, shape.bits, mode=shape.mode, class_predicate=chosen)
    return model


def shape_bytes(shape: Shape, dtype: mx.Dtype) -> int:
    return sum(array.nbytes for array in parameters(make_shape_outline(shape, dtype)).values())


def checkpoint_bytes(
    checkpoint: Checkpoint, dtype: mx.Dtype | None, dequantise: bool, keep_k_quants: bool = False
) -> int:
    """`dtype` None: floats stay as they are stored. `keep_k_quants`: so do matrices of K-quants."""
    family = find(checkpoint.config)
    if dequantise and not family.is_adapter:
        return count_parameters(build_skeleton(checkpoint.config)) * (dtype or mx.float16).size
    used = (
        info
        for name, info in checkpoint.sizes().items()
        if not any(re.search(pattern, name) for pattern, _ in family.IGNORED_TENSORS)
    )
    return sum(info.nbytes if keep_k_quants and is_k_quant_matrix(info) else loaded_bytes(info, dtype) for info in used)


def is_k_quant_matrix(info: TensorInfo) -> bool:
    """Whether CPU kernels read the blocks of a GGUF tensor as they are."""
    return info.dtype.lower() in K_QUANTS and len(info.shape) == 2


def loaded_bytes(info: TensorInfo, dtype: mx.Dtype | None) -> int:
    """Bytes of a tensor once loaded: floats are cast, types that MLX has no kernel for are dequantised."""
    if info.dtype in AFFINE:
        return packed_bytes(prod(info.shape), AFFINE[info.dtype], dtype)
    if info.dtype in KEPT or (dtype is None and info.dtype in ("F32", "F16", "BF16")):
        return info.nbytes
    return prod(info.shape) * (UNPACKED_BYTES if dtype is None else dtype.size)


def packed_bytes(count: int, bits: int, dtype: mx.Dtype | None) -> int:
    """Of an affine matrix in groups of 32, with a scale and a bias each."""
    return count * bits // 8 + count // 32 * 2 * (UNPACKED_BYTES if dtype is None else dtype.size)


def check_weights_fit(name: str, need: int, config: EngineConfig) -> None:
    """WontFit, with the numbers, where the weights alone are too large for the device or for the user's limit."""
    if config.memory is not None and need > (limit := nbytes(config.memory)):
        raise WontFit(f"{name} needs {need} bytes for its weights, memory is limited to {limit}; raise it")
    total, free = device.memory()
    if need > free:
        raise WontFit(
            f"{name} needs {need} bytes for its weights, the device has {free} of {total} bytes free; use a smaller "
            "model or fewer bits, or close other engines and programs"
        )
