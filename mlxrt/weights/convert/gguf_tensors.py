"""A model's tensors as a GGUF file has them: llama.cpp's names, orders of rows and values; read one by one."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ...errors import BadCheckpoint, UnsupportedModel, quote
from ..formats.gguf.architectures import Architecture
from ..formats.gguf.reader import GGUFTensor
from ..formats.gguf.writer import TensorPlan
from ..formats.quantized import MLXFormat
from ..load.assign import without_formats
from ..load.build import NativeTensors
from .gguf_blocks import encode, slice_rows
from .gguf_types import FLOAT_TYPES, TypeMix

LAYER = re.compile(r"(model\.layers\.\d+\.)(.+)\.(\w+)")
BETA_ALPHA = "in_proj_ba"


@dataclass(frozen=True)
class FileTensor:
    """A tensor of the file to be: its GGUF name and what it is made of."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[], mx.array]
    path: str  # of our module, where it is one alone


class TensorSource:
    """Hands out a model's tensors, each once: what was handed out is not kept."""

    def __init__(self, native: NativeTensors, arch: Architecture):
        self.native, self.arch = native, arch
        self.config: Any = native.model.config
        modules = dict(native.model.named_modules())
        arrays, formats = native.arrays, native.formats
        self.shapes = {name: tuple(array.shape) for name, array in without_formats(arrays, formats).items()}
        self.shapes |= {f"{path}.weight": tuple(modules[path]["weight"].shape) for path in formats}

    def take(self, name: str) -> mx.array:
        """One of our model's tensors; a quantised one unpacked to float32."""
        path, arrays = name.removesuffix(".weight"), self.native.arrays
        fmt = self.native.formats.get(path) if name.endswith(".weight") else None
        if fmt is None:
            return arrays.pop(name)
        array = fmt.dequantize(path, arrays)
        mx.eval(array)
        for part in fmt.parts:
            arrays.pop(f"{path}.{part}", None)
        return array

    def file_tensors(self) -> list[FileTensor]:
        """All of them, in the order of our model."""
        found: list[FileTensor] = []
        joined: set[str] = set()
        for name in self.shapes:
            whole, parts = self.find_join(name)
            if whole in joined:
                continue
            joined |= {whole} if len(parts) > 1 else set()
            file_name = self.arch.file_name(whole)
            if file_name is None:
                raise UnsupportedModel(f"GGUF has no name for the tensor {quote(name)} of this architecture")
            found.append(self.describe(whole, file_name, parts))
        return found

    def find_join(self, name: str) -> tuple[str, tuple[str, ...]]:
        """The file's tensor that this one is in, by our kind of name, and all that are in it."""
        layer = LAYER.fullmatch(name)
        for whole, parts in self.arch.joined.items() if layer else ():
            if layer and layer[2] in parts:
                return f"{layer[1]}{whole}.{layer[3]}", tuple(f"{layer[1]}{part}.{layer[3]}" for part in parts)
        return name, (name,)

    def describe(self, whole: str, file_name: str, parts: tuple[str, ...]) -> FileTensor:
        if missing := [part for part in parts if part not in self.shapes]:
            raise BadCheckpoint(f"the model has no {quote(missing[0])} beside {quote(parts[0])}")
        shapes = [self.shapes[part] for part in parts]
        axis = 0 if len(shapes[0]) < 3 else 1  # experts are stacked before their rows
        shape = list(shapes[0])
        shape[axis] = sum(other[axis] for other in shapes) if shape else 1
        if whole.endswith("shared_expert_gate.weight"):
            shape = shape[1:]
        read = lambda: self.join(whole, [self.take(part) for part in parts], axis)  # noqa: E731
        return FileTensor(file_name, tuple(shape), read, whole.removesuffix(".weight") if len(parts) == 1 else "")

    def join(self, whole: str, arrays: list[mx.array], axis: int) -> mx.array:
        if BETA_ALPHA in whole:  # key head by key head
            heads = self.config.linear_num_key_heads
            arrays = [array.reshape(heads, -1, array.shape[-1]) for array in arrays]
            return mx.concatenate(arrays, axis=1).flatten(0, 1)
        array = arrays[0] if len(arrays) == 1 else mx.concatenate(arrays, axis=axis)
        return self.stored_value(whole, array)

    def stored_value(self, name: str, array: mx.array) -> mx.array:
        """Our numbers as files have them, where they are others."""
        if name.endswith("linear_attn.A_log"):  # what the state decays by
            return mx.array(
                -np.exp(np.array(array.astype(mx.float32), np.float64)).astype(np.float32)
            )  # MLX rounds to fewer bits
        if name.endswith(".router.scale"):  # ours is divided by what Gemma 4 divides its input by
            return array.astype(mx.float32) * self.config.hidden_size**0.5
        if name.endswith("shared_expert_gate.weight"):
            return array[0]
        return array

    def plan(self, mix: TypeMix, config: Mapping[str, Any]) -> list[TensorPlan]:
        """The tensors with their types; `config` is what a reader will make of the file's keys."""
        return [self.plan_one(tensor, mix, config) for tensor in self.file_tensors()]

    def plan_one(self, tensor: FileTensor, mix: TypeMix, config: Mapping[str, Any]) -> TensorPlan:
        kind = mix.choose(tensor.name, tensor.shape)
        info = GGUFTensor(tensor.name, tensor.shape, "F32", 0, 0)
        orders = self.arch.row_order(info, config), self.arch.column_order(info, config)
        fmt = self.native.formats.get(tensor.path)
        if isinstance(fmt, MLXFormat) and fmt.mode == "mxfp4" and kind not in FLOAT_TYPES and orders == (None, None):
            return TensorPlan(tensor.name, tensor.shape, "MXFP4", lambda: self.copy_mxfp4(tensor.path))
        return TensorPlan(tensor.name, tensor.shape, kind, lambda: self.encode(tensor, kind, orders))

    def encode(
        self, tensor: FileTensor, kind: str, orders: tuple[np.ndarray | None, np.ndarray | None]
    ) -> Iterator[np.ndarray]:
        array = tensor.read()
        rows, columns = orders
        if rows is not None:
            array = array[mx.array(np.argsort(rows))]
        if columns is not None:
            array = array[:, mx.array(np.argsort(columns))]
        for part in slice_rows(array.shape[0], math.prod(array.shape[1:])):
            yield from encode(tensor.name, np.array(array[part].astype(mx.float32)), kind)

    def copy_mxfp4(self, path: str) -> Iterator[np.ndarray]:
        """MLX has numbers 2i and 2i + 1 of a block in one byte, ggml numbers i and i + 16."""
        packed, scales = (np.array(self.native.arrays.pop(f"{path}.{part}")) for part in ("weight", "scales"))
        pairs = packed.view(np.uint8).reshape(*scales.shape, 16)
        values = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(*scales.shape, 2, 16)
        halves = values[..., 0, :] | values[..., 1, :] << 4
        yield np.concatenate([scales[..., None], halves], axis=-1)
