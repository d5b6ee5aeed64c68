"""How many bytes a model's weights take once loaded, from headers and configs alone; and whether they fit the device.

Asked before anything is allocated: CUDA's unified memory would take more than the device has and then crawl, and a
device that is full in the middle of loading leaves little to say.
"""

import re
from collections.abc import Mapping
from math import prod
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..config import EngineConfig, nbytes
from ..errors import WontFit
from ..kernels import device
from ..kernels.cpu.interleave import BLOCKS
from ..kernels.ops.k_quants import CPU_BLOCKS, SPLIT_KINDS
from ..kernels.ops.quantized import CPU_BITS
from ..models import CausalLM, find
from ..models.config import suppress_reports
from ..weights import Checkpoint, TensorInfo
from ..weights.formats.gguf.tensors import PACKED
from ..weights.formats.quantized import AFFINE_GROUPS
from ..weights.random_models import Shape, is_quantizable

FLOATS, HALVES = ("F32", "F16", "BF16"), ("F16", "BF16")
KEPT = ("U32", "I32", "U16", "U8", "I8", *PACKED)  # dtypes of packed tensors: loaded as they are
AFFINE = {"Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5, "Q8_0": 8}  # of them, those with scales that are cast -> bits
PUBLISHED_MXFP4 = ("_blocks", "_scales")
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
    checkpoint: Checkpoint, dtype: mx.Dtype | None, dequantise: bool, on_cpu: bool = False, on_gpu: bool = False
) -> int:
    """`dtype` None: floats stay as they are stored. `on_cpu`: CPU kernels compute packed matrices, which stay so.
    `on_gpu`: GPU kernels compute K-quants."""
    family = find(checkpoint.config)
    if dequantise and not family.is_adapter:
        return count_parameters(build_skeleton(checkpoint.config)) * (dtype or mx.float16).size
    sizes = checkpoint.sizes()
    used = (
        (name, info)
        for name, info in sizes.items()
        if not any(re.search(pattern, name) for pattern, _ in family.IGNORED_TENSORS)
    )
    return sum(
        loaded_bytes(info, None, on_cpu=True)
        if on_cpu and is_cpu_matrix(name, sizes)
        else loaded_bytes(info, dtype, on_gpu=on_gpu and not family.is_adapter)
        for name, info in used
    )


def is_cpu_matrix(name: str, sizes: Mapping[str, TensorInfo]) -> bool:
    """Whether a tensor is a matrix that CPU kernels read as it is stored, or its scales or biases."""
    info = sizes[name]
    if info.dtype in HALVES:
        return name.endswith(".weight") and len(info.shape) in (2, 3) and info.shape[-1] % 16 == 0
    if info.dtype in AFFINE or info.dtype == "MXFP4" or info.dtype.lower() in CPU_BLOCKS:
        return len(info.shape) in (2, 3)
    if name.endswith(PUBLISHED_MXFP4):  # gpt-oss: a stack's bytes [E, out, in / 32, 16] and scales
        stem = name.rpartition("_")[0]
        blocks, scales = (sizes.get(stem + part) for part in PUBLISHED_MXFP4)
        return blocks is not None and scales is not None and blocks.dtype == scales.dtype == "U8"
    stem, _, part = name.rpartition(".")
    if part not in ("weight", "scales", "biases"):
        return False
    weight, scales, biases = (sizes.get(f"{stem}.{part}") for part in ("weight", "scales", "biases"))
    if weight is None or scales is None or weight.dtype != "U32" or len(weight.shape) not in (2, 3):
        return False
    words, groups = weight.shape[-1], scales.shape[-1]
    if biases is None:
        return scales.dtype == "U8" and words == 4 * groups  # mxfp4
    if scales.dtype not in FLOATS or biases.dtype != scales.dtype:
        return False
    return any(32 * words == bits * groups * group for bits in CPU_BITS for group in AFFINE_GROUPS)


def cpu_kernels_read(checkpoint: Checkpoint) -> bool:
    """Whether CPU kernels read all packed matrices; types of GGUF that nothing reads do not count."""
    sizes = checkpoint.sizes()
    others = [name for name, info in sizes.items() if info.dtype not in FLOATS and not is_cpu_matrix(name, sizes)]
    unpacked = ("IQ", "TQ")
    return not any(len(sizes[name].shape) != 2 or not sizes[name].dtype.startswith(unpacked) for name in others)


def loaded_bytes(info: TensorInfo, dtype: mx.Dtype | None, on_cpu: bool = False, on_gpu: bool = False) -> int:
    """Bytes of a tensor once loaded: floats are cast, types that have no kernel are dequantised."""
    if (kind := info.dtype.lower()) in CPU_BLOCKS and dtype is None and on_cpu:
        block = BLOCKS.get(kind)  # rows may be interleaved, which takes up to 3 % more
        return info.nbytes if block is None else info.nbytes // block.nbytes * block.interleaved_bytes
    if info.dtype in AFFINE:
        return packed_bytes(prod(info.shape), AFFINE[info.dtype], dtype)
    if on_gpu and (split := SPLIT_KINDS.get(info.dtype.lower())) and len(info.shape) > 1:
        return info.nbytes // split.nbytes * split.split_bytes
    if info.dtype in KEPT or (dtype is None and info.dtype in FLOATS):
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
