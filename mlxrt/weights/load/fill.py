"""A model from a checkpoint: every tensor finds its place or its reason, every parameter its tensor.

Refuses to know file formats and architectures; it only compares names, shapes and dtypes.
"""

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from ...errors import BadCheckpoint, shown
from ...models import CausalLM, find
from ..formats.checkpoint import Checkpoint
from ..formats.codebook import listed
from ..formats.converted import convert, method_of
from ..formats.fp8 import SCALE, has_fp8, unpack_fp8
from ..formats.jang import labels as jang
from ..formats.jang.bitstreams import has_streams, read_streams
from ..formats.jang.jangtq import check_sidecar
from ..formats.quantized import FLOATS, Layout, contradictions, kind, refuse_methods
from ..formats.weight_format import Stored
from .layouts import Hints, find_layouts

log = logging.getLogger("mlxrt")

Arrays = dict[str, mx.array]
HEAD, TABLE = "lm_head.", "embed_tokens."
AS_STORED = (".norms", ".codebook")  # read into float32 where they are used: a cast to bfloat16 would lose bits


def build(checkpoint: Checkpoint, *, dtype: mx.Dtype | None = None, dequantise: bool = False) -> CausalLM:
    """The model of a checkpoint, its weights in memory; `dequantise` gives plain matrices for packed ones."""
    family = find(checkpoint.config)
    if family.adapted:
        from .mlx_lm import fill_foreign

        refuse_methods(checkpoint.config)
        return fill_foreign(checkpoint, dtype=dtype, dequantise=dequantise)
    return fill(family, checkpoint, dtype=dtype, dequantise=dequantise)


def fill(family: type[CausalLM], checkpoint: Checkpoint, *, dtype: mx.Dtype | None, dequantise: bool) -> CausalLM:
    """`build` for a family that is already known."""
    refuse_methods(checkpoint.config)
    config = family.parse(checkpoint.config)
    check_depth(checkpoint, family.rename)
    model = family(config)  # type: ignore[call-arg]  # every family takes its config; nn.Module takes nothing
    loaded, dtype = load(checkpoint, dtype, family)
    bundle = jang.jang_of(checkpoint.config)
    arrays = select(family, loaded, jang.DROPS if bundle else ())
    if has_fp8(arrays):
        dtype = dtype or fitting_dtype(family, arrays)
        arrays = unpack_fp8(arrays, checkpoint.config, dtype)
    arrays = family.arrange(config, arrays)
    drop_tied_head(model, arrays)
    dtype = dtype or fitting_dtype(family, arrays)
    hints = Hints(in_our_names(checkpoint.config, family.rename), bundle)
    layouts = find_layouts(model, arrays, hints)
    for line in contradicted(hints, layouts):
        log.warning(line)
    plain = layouts if dequantise else tables(model, layouts)
    arrays = dequantised(arrays, plain, dtype)
    packed = {path: layout for path, layout in layouts.items() if path not in plain}
    place(model, replace(model, arrays, packed, dtype), dtype)
    return model


def contradicted(hints: Hints, layouts: Mapping[str, Stored]) -> Iterable[str]:
    """A line for everything that labels say and tensors refute."""
    if line := contradictions(hints.config, {path: x for path, x in layouts.items() if isinstance(x, Layout)}):
        yield line
    if hints.jang is not None:
        yield from hints.jang.contradictions(layouts)


def tables(model: nn.Module, layouts: Mapping[str, Stored]) -> dict[str, Stored]:
    """Embeddings in layouts that have no embedding of their own: these are unpacked."""
    modules = dict(model.named_modules())
    found = {p: x for p, x in layouts.items() if isinstance(modules[p], nn.Embedding) and not isinstance(x, Layout)}
    for path, layout in found.items():
        log.info(f"{path} is {layout}; as an embedding it is kept unpacked")
    return found


def load(
    checkpoint: Checkpoint, dtype: mx.Dtype | None, family: type[CausalLM] = CausalLM
) -> tuple[Arrays, mx.Dtype | None]:
    """Every tensor, those of other quantisers as MLX's; and the dtype, which is chosen before new floats are made."""
    arrays = checkpoint.load()
    if jang.jang_of(checkpoint.config) is not None:
        jang.check_finite(arrays)
        if (sidecar := checkpoint.beside(jang.SIDECAR)) is not None:
            check_sidecar(jang.SIDECAR, sidecar)
    arrays = listed(checkpoint.config, arrays)
    if has_streams(arrays):
        dtype = dtype or fitting_dtype(family, arrays)
        return read_streams(arrays, dtype), dtype
    if method_of(checkpoint.config) is None:
        return arrays, dtype
    dtype = dtype or fitting_dtype(family, arrays)
    return convert(arrays, checkpoint.config, dtype), dtype


def check_depth(checkpoint: Checkpoint, rename: Callable[[str], str]) -> None:
    """Before the model is made: a damaged layer count would make millions of modules."""
    text = checkpoint.config.get("text_config")  # where the checkpoint can also see or hear
    said = (text if isinstance(text, Mapping) else checkpoint.config).get("num_hidden_layers")
    layers = {m[1] for name in checkpoint.sizes() if (m := re.search(r"(?:^|\.)layers\.(\d+)\.", rename(name)))}
    if layers and type(said) is int and said > len(layers):
        raise BadCheckpoint(f"{checkpoint.name}: the config says {said} layers, the weights hold {len(layers)}")


def in_our_names(config: Mapping[str, Any], rename: Callable[[str], str]) -> dict[str, Any]:
    """The config with the modules that its quantisation names called as in our model."""
    keys = [key for key in ("quantization", "quantization_config") if isinstance(config.get(key), Mapping)]
    named = lambda path: rename(f"{path}.weight").removesuffix(".weight")  # noqa: E731  renaming is of tensors
    ours = {key: {named(k) if isinstance(v, Mapping) else k: v for k, v in config[key].items()} for key in keys}
    return {**config, **ours}


def select(family: type[CausalLM], arrays: Arrays, drops: tuple[tuple[str, str], ...] = ()) -> Arrays:
    """The arrays that are kept, under the model's names."""
    kept: Arrays = {}
    for key, array in arrays.items():
        if any(re.search(pattern, key) for pattern, _ in (*family.DROPS, *drops)):
            continue
        name = family.rename(key)
        if name in kept:
            raise BadCheckpoint(f"two tensors of the checkpoint are {shown(name)}; one of them is {shown(key)}")
        kept[name] = array
    return kept


def drop_tied_head(model: nn.Module, arrays: Arrays) -> None:
    """A head stored although the model uses the embedding: dropped when they are the same, an error when not."""
    head = {name: array for name, array in arrays.items() if name.startswith(HEAD)}
    if not head or "lm_head" in model:
        return
    [table] = [path for path, _ in model.named_modules() if f"{path}.".endswith(TABLE)] or [""]
    for name, array in head.items():
        other = arrays.get(f"{table}.{name.removeprefix(HEAD)}")
        if other is None or other.shape != array.shape or not mx.array_equal(other, array, equal_nan=True).item():
            raise BadCheckpoint(
                f"config.json ties the head to the embedding, but the checkpoint's {shown(name)} differs from {table}; "
                "set tie_word_embeddings to false if the head is meant to be used"
            )
        del arrays[name]


def fitting_dtype(family: type[CausalLM], arrays: Arrays) -> mx.Dtype:
    """The dtype of the weights, unless the family's activations do not fit into it."""
    dtype = main_dtype(arrays)
    if dtype != mx.float16 or not family.OUTGROWS_HALF:
        return dtype
    log.warning("the weights are float16, computed in bfloat16: the activations of this family outgrow float16")
    return mx.bfloat16


def main_dtype(arrays: Arrays) -> mx.Dtype:
    """The float dtype that holds most bytes. One for all: a lone float32 norm would make every activation float32."""
    held: Counter[mx.Dtype] = Counter()
    for name, array in arrays.items():
        if array.dtype in FLOATS and not name.endswith(SCALE):
            held[array.dtype] += array.nbytes
    if not held:
        raise BadCheckpoint("the checkpoint holds no float tensors (F32, F16 or BF16)")
    return held.most_common(1)[0][0]


def dequantised(arrays: Arrays, layouts: Mapping[str, Stored], dtype: mx.Dtype) -> Arrays:
    whole = {f"{path}.weight": layout.matrix(path, arrays).astype(dtype) for path, layout in layouts.items()}
    return others(arrays, layouts) | whole


def others(arrays: Arrays, layouts: Mapping[str, Stored]) -> Arrays:
    """The tensors that layouts are not made of."""
    theirs = {f"{path}.{part}" for path, layout in layouts.items() for part in layout.parts}
    return {name: array for name, array in arrays.items() if name not in theirs}


def replace(model: nn.Module, arrays: Arrays, layouts: Mapping[str, Stored], dtype: mx.Dtype) -> Arrays:
    """Modules that compute with the stored forms in place of plain ones; the arrays under those modules' names."""
    modules = dict(model.named_modules())
    made = [(path, layout.module(modules[path], dtype)) for path, layout in layouts.items()]
    model.update_modules(tree_unflatten(made))
    named = {f"{p}.{name}": a for p, x in layouts.items() for name, a in x.tensors(p, arrays).items()}
    return others(arrays, layouts) | named


def place(model: CausalLM, arrays: Arrays, dtype: mx.Dtype) -> None:
    """Check names, dtypes and shapes, then fill."""
    wanted: dict[str, Any] = dict(tree_flatten(model.parameters()))
    if lost := sorted(wanted.keys() - arrays.keys()):
        raise BadCheckpoint(f"the checkpoint has no tensor for {count(lost)} of the model")
    if left := sorted(arrays.keys() - wanted.keys()):
        raise BadCheckpoint(f"the model has no place for {count(left)} of the checkpoint")
    for name, parameter in wanted.items():
        check_fit(name, parameter, arrays[name])
    wide = re.compile("|".join(model.WIDE) or "(?!)")  # (?!): nothing
    cast = {
        name: array.astype(mx.float32 if wide.search(name) else dtype) if array.dtype in FLOATS else array
        for name, array in arrays.items()
        if not name.endswith(AS_STORED)
    }
    model.update(tree_unflatten(list((arrays | cast).items())))
    mx.eval(model.parameters())


def count(names: Iterable[str]) -> str:
    names = [shown(name) for name in names]
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{len(names)} tensors ({', '.join(names[:5])}{more})"


def check_fit(name: str, parameter: mx.array, found: mx.array) -> None:
    packs = parameter.dtype not in FLOATS  # words of a packed weight, byte scales
    if found.dtype != parameter.dtype if packs else found.dtype not in FLOATS:
        expected = kind(parameter) if packs else "float32, float16 or bfloat16"
        raise BadCheckpoint(f"{name}: expected {expected}, found {kind(found)}")
    if found.shape != parameter.shape:
        raise BadCheckpoint(f"{name}: expected shape {list(parameter.shape)}, found {list(found.shape)}")
