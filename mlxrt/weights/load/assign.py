"""Loading a checkpoint's tensors, selecting a dtype, and assigning them to a model's parameters.

Every tensor must have a parameter and every parameter a tensor; what a model ignores it names. File formats and
architectures are known elsewhere: here are names, shapes and dtypes only.
"""

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from ...errors import BadCheckpoint, quote
from ...kernels.dtypes import FLOATS
from ...models import CausalLM
from ..formats.checkpoint import Checkpoint
from ..formats.codebook import apply_codebook_config
from ..formats.fp8 import SCALE
from ..formats.gguf.k_quants import K_QUANT_SUFFIXES
from ..formats.jang import labels as jang
from ..formats.jang.bitstreams import has_streams, read_streams
from ..formats.jang.jangtq import check_sidecar
from ..formats.repack import detect_method, repack
from ..formats.weight_format import WeightFormat, dtype_name
from ..progress import track

log = logging.getLogger("mlxrt")

Arrays = dict[str, mx.array]
BAR_BYTES, PART_BYTES = 1 << 29, 1 << 26  # what is read within a second needs no bar
KEEP_DTYPE = (".norms", ".codebook")  # read as float32 where they are used: a cast to bfloat16 would lose bits


def load_tensors(
    checkpoint: Checkpoint, dtype: mx.Dtype | None, family: type[CausalLM] = CausalLM
) -> tuple[Arrays, mx.Dtype | None]:
    """All tensors, those of other quantisers repacked as MLX's; and the dtype, if repacking had to choose it."""
    arrays = checkpoint.load()
    if jang.read_labels(checkpoint.config) is not None:
        jang.check_finite(arrays)
        if (sidecar := checkpoint.load_sidecar(jang.SIDECAR)) is not None:
            check_sidecar(jang.SIDECAR, sidecar)
    arrays = apply_codebook_config(checkpoint.config, arrays)
    if has_streams(arrays):
        dtype = dtype or select_dtype(family, arrays)
        return read_streams(arrays, dtype), dtype
    if detect_method(checkpoint.config) is None:
        return arrays, dtype
    dtype = dtype or select_dtype(family, arrays)
    return repack(arrays, checkpoint.config, dtype), dtype


def check_depth(checkpoint: Checkpoint, rename: Callable[[str], str]) -> None:
    """Compare the layer count with the tensors before the model is built: a damaged one would make millions."""
    text = checkpoint.config.get("text_config")  # multimodal checkpoints
    layers = (text if isinstance(text, Mapping) else checkpoint.config).get("num_hidden_layers")
    stored = {m[1] for name in checkpoint.sizes() if (m := re.search(r"(?:^|\.)layers\.(\d+)\.", rename(name)))}
    if stored and type(layers) is int and layers > len(stored):
        raise BadCheckpoint(f"{checkpoint.name}: the config says {layers} layers, the weights hold {len(stored)}")


def rename_quantized_modules(config: Mapping[str, Any], rename: Callable[[str], str]) -> dict[str, Any]:
    """The config with the module names in its quantization entries as in our model."""
    keys = [key for key in ("quantization", "quantization_config") if isinstance(config.get(key), Mapping)]
    ours = lambda path: rename(f"{path}.weight").removesuffix(".weight")  # noqa: E731  `rename` takes tensor names
    renamed = {key: {ours(k) if isinstance(v, Mapping) else k: v for k, v in config[key].items()} for key in keys}
    return {**config, **renamed}


def select_tensors(family: type[CausalLM], arrays: Arrays, ignored: tuple[tuple[str, str], ...] = ()) -> Arrays:
    """The tensors that the model uses, under its names."""
    kept: Arrays = {}
    for key, array in arrays.items():
        if any(re.search(pattern, key) for pattern, _ in (*family.IGNORED_TENSORS, *ignored)):
            continue
        name = family.rename(key)
        if name in kept:
            raise BadCheckpoint(f"two tensors of the checkpoint are {quote(name)}; one of them is {quote(key)}")
        kept[name] = array
    return kept


def select_dtype(family: type[CausalLM], arrays: Arrays) -> mx.Dtype:
    """The dtype of the weights, or bfloat16 where the family's activations overflow float16."""
    dtype = main_dtype(arrays)
    if dtype != mx.float16 or not family.NEEDS_BF16:
        return dtype
    log.warning("the weights are float16, computed in bfloat16: the activations of this family overflow float16")
    return mx.bfloat16


def main_dtype(arrays: Arrays) -> mx.Dtype:
    """The float dtype with the most bytes. One for all: a single float32 norm would make every activation float32."""
    nbytes: Counter[mx.Dtype] = Counter()
    for name, array in arrays.items():
        if name.endswith(K_QUANT_SUFFIXES):
            nbytes[mx.float16] += array.nbytes  # that of their blocks' scales
        elif array.dtype in FLOATS and not name.endswith(SCALE):
            nbytes[array.dtype] += array.nbytes
    if not nbytes:
        raise BadCheckpoint("the checkpoint holds no float tensors (F32, F16 or BF16)")
    return nbytes.most_common(1)[0][0]


def dequantize(arrays: Arrays, formats: Mapping[str, WeightFormat], dtype: mx.Dtype) -> Arrays:
    """The tensors with the matrices of `formats` dequantised."""
    matrices = {f"{path}.weight": fmt.dequantize(path, arrays).astype(dtype) for path, fmt in formats.items()}
    return without_formats(arrays, formats) | matrices


def without_formats(arrays: Arrays, formats: Mapping[str, WeightFormat]) -> Arrays:
    """The tensors that are not part of any of `formats`."""
    parts = {f"{path}.{part}" for path, fmt in formats.items() for part in fmt.parts}
    return {name: array for name, array in arrays.items() if name not in parts}


def assign(model: CausalLM, arrays: Arrays, dtype: mx.Dtype, keep: frozenset[str] = frozenset()) -> None:
    """Check names, dtypes and shapes, then set the model's parameters. `keep`: those that are not cast."""
    parameters: dict[str, Any] = dict(tree_flatten(model.parameters()))
    if missing := sorted(parameters.keys() - arrays.keys()):
        raise BadCheckpoint(f"the checkpoint has no tensor for {list_names(missing)} of the model")
    if unexpected := sorted(arrays.keys() - parameters.keys()):
        raise BadCheckpoint(f"the model has no parameter for {list_names(unexpected)} of the checkpoint")
    for name, parameter in parameters.items():
        check_fit(name, parameter, arrays[name])
    fp32 = re.compile("|".join(model.KEEP_FP32) or "(?!)")  # (?!) matches nothing
    cast = {
        name: array.astype(mx.float32 if fp32.search(name) else dtype) if array.dtype in FLOATS else array
        for name, array in arrays.items()
        if not name.endswith(KEEP_DTYPE) and name not in keep
    }
    ready = arrays | cast
    model.update(tree_unflatten(list(ready.items())))
    read_weights(list(ready.values()))


def read_weights(arrays: list[mx.array]) -> None:
    """Read the files and convert, which MLX puts off until here; with a progress bar where it takes long."""
    if sum(array.nbytes for array in arrays) < BAR_BYTES:
        mx.eval(arrays)
        return
    for part in track(split_by_size(arrays), "loading"):
        mx.eval(part)


def split_by_size(arrays: list[mx.array]) -> list[list[mx.array]]:
    """Parts of about PART_BYTES, in order."""
    parts: list[list[mx.array]] = [[]]
    for array in arrays:
        if sum(a.nbytes for a in parts[-1]) >= PART_BYTES:
            parts.append([])
        parts[-1].append(array)
    return parts


def list_names(names: Iterable[str]) -> str:
    names = [quote(name) for name in names]
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{len(names)} tensors ({', '.join(names[:5])}{more})"


def check_fit(name: str, parameter: mx.array, tensor: mx.array) -> None:
    packed = parameter.dtype not in FLOATS  # uint32 of a quantised weight, uint8 scales
    if tensor.dtype != parameter.dtype if packed else tensor.dtype not in FLOATS:
        expected = dtype_name(parameter) if packed else "float32, float16 or bfloat16"
        raise BadCheckpoint(f"{name}: expected {expected}, found {dtype_name(tensor)}")
    if tensor.shape != parameter.shape:
        raise BadCheckpoint(f"{name}: expected shape {list(parameter.shape)}, found {list(tensor.shape)}")
