"""Detects the weight format of every module from tensor names and shapes; labels count only where those are silent.

`detect_formats` looks at loaded tensors. For `mlxrt info`, which loads nothing, `formats_from_headers` does the same
from headers alone; what only values tell (Hadamard rotation of JANGTQ 2, norms) is not known there.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...errors import BadCheckpoint, UnsupportedModel
from ...kernels.ops.bitpack import aligned_words
from ...models.moe import ExpertLinear
from ...models.quantized.centroids import CUBIC
from ...models.quantized.lut_linear import LUTEncoding
from ..formats.checkpoint import TensorInfo
from ..formats.codebook import read_codebook_matrix
from ..formats.gguf.k_quants import K_QUANT_SUFFIXES, read_k_quant
from ..formats.hadamard import AWQ_SCALES, with_input_transform
from ..formats.jang.jangh import read_jangh
from ..formats.jang.jangtq import BITS, JANGTQ2_PARTS, JANGTQ_PARTS, LUTFormat, read_jangtq
from ..formats.jang.labels import JangLabels
from ..formats.quantized import MLXFormat, contradictions, detect_mlx
from ..formats.weight_format import Arrays, WeightFormat

Shape = tuple[int, ...]
Infos = Mapping[str, TensorInfo]  # the headers of all tensors
Described = WeightFormat | str  # a format, or its name where headers do not suffice to build one

HEADER_DTYPES = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16, "U32": mx.uint32, "U8": mx.uint8}
# Tensors that belong to a matrix and are counted with it.
COMPANIONS = (
    ".scales", ".biases", ".tq_norms", ".tq_bits", ".tq2_scales", ".codebook", ".qzeros", ".zeros", ".bits", ".bit_map",
    ".block_offsets", ".shape", ".importance", *(f".{name}" for name in AWQ_SCALES),
)  # fmt: skip
MATRICES = (".weight", ".tq_packed", ".tq2_packed", ".codes", ".qweight")
SINGLE_EXPERT = re.compile(r"(\bexperts)\.\d+\.")
JANG1_STREAM = "JANG 1 stream"


@dataclass(frozen=True)
class Hints:
    """What a checkpoint claims of its tensors: config.json with our module names, and JANG labels."""

    config: Mapping[str, Any]
    jang: JangLabels | None


def read_mlx(path: str, shape: Shape, arrays: Arrays, hints: Hints) -> WeightFormat:
    packed = arrays.get(f"{path}.weight")
    if packed is not None and packed.shape[:-1] != shape[:-1]:
        expected = ", ".join([*map(str, shape[:-1]), "packed"])
        raise BadCheckpoint(f"{path}.weight: expected shape [{expected}], found {list(packed.shape)}")
    fmt = detect_mlx(path, shape[-1], arrays)
    return with_input_transform(path, shape, fmt, arrays, hadamard=hints.jang is not None and hints.jang.hadamard)


def read_jangtq1(path: str, shape: Shape, arrays: Arrays, hints: Hints) -> WeightFormat:
    return read_jangtq(path, shape, arrays, (hints.jang or JangLabels({}, hints.config)).seed)


def refuse_trellis(path: str, shape: Shape, arrays: Arrays, hints: Hints) -> WeightFormat:
    raise UnsupportedModel(f"{path} is JANGT (trellis codes), which is not read; take a JANG, JANGTQ or MLX version")


def read_k_quant_of(kind: str) -> Callable[[str, Shape, Arrays, Hints], WeightFormat]:
    return lambda path, shape, arrays, hints: read_k_quant(path, kind, tuple(shape), arrays)


# The tensor that identifies a format -> its reader.
READERS: dict[str, Callable[[str, Shape, Arrays, Hints], WeightFormat]] = {
    ".scales": read_mlx,
    ".tq_packed": read_jangtq1,
    ".tq2_packed": lambda path, shape, arrays, hints: read_jangh(path, shape, arrays, hints.config),
    ".codes": lambda path, shape, arrays, hints: read_codebook_matrix(path, shape, arrays),
    ".jt_packed": refuse_trellis,
    **{suffix: read_k_quant_of(suffix[1:]) for suffix in K_QUANT_SUFFIXES},
}


def detect_formats(model: nn.Module, arrays: Arrays, hints: Hints) -> dict[str, WeightFormat]:
    """The modules whose matrix is quantised."""
    found: dict[str, WeightFormat] = {}
    modules = dict(model.named_modules())
    for suffix, read in READERS.items():
        for path in [name.removesuffix(suffix) for name in arrays if name.endswith(suffix)]:
            if path not in modules:
                continue  # `assign` reports it
            module = modules[path]
            if not isinstance(module, nn.Linear | nn.Embedding | ExpertLinear):
                raise UnsupportedModel(f"{path} is packed, but it is a {type(module).__name__}: only matrices can be")
            other = str(found[path]) if path in found else "weight" if f"{path}.weight" in arrays else None
            if other is not None and (path in found or suffix != ".scales"):
                raise BadCheckpoint(f"{path} is in the checkpoint twice: as {other} and as {suffix[1:]}; keep one")
            found[path] = read(path, module["weight"].shape, arrays, hints)
    return found


def module_path(name: str) -> str:
    """The module of a tensor; experts that are stored one by one are one module."""
    return SINGLE_EXPERT.sub(r"\1.", name.rpartition(".")[0])


def format_from_headers(name: str, shape: Shape, sizes: Infos, jang: JangLabels | None) -> Described | None:
    """The format of the matrix of `shape` whose main tensor is `name`; None for a plain one."""
    path, _, part = name.rpartition(".")
    info = sizes[name]
    if part == "weight":
        return mlx_from_headers(path, shape, sizes, jang)
    if part == "tq_packed":
        bits = next((b for b in BITS if aligned_words(shape[-1], b) == info.shape[-1]), None)
        seed = jang.seed if jang else 42
        return LUTFormat(LUTEncoding.jangtq(bits, shape[-1], seed), JANGTQ_PARTS) if bits else "jangtq"
    if part == "tq2_packed":
        bits = 32 * info.shape[-1] // shape[-1]
        known = bits in CUBIC
        return LUTFormat(LUTEncoding.jangtq2(bits, shape[-1], rotated=True), JANGTQ2_PARTS) if known else "jangtq2"
    if part == "codes" and (book := sizes.get(f"{path}.codebook")) and len(book.shape) == 2:
        return f"codebook of {book.shape[0]} x {book.shape[1]}"
    if part == "qweight" and info.dtype == "U8":
        return JANG1_STREAM
    return None


def mlx_from_headers(path: str, shape: Shape, sizes: Infos, jang: JangLabels | None) -> WeightFormat | None:
    if f"{path}.scales" not in sizes:
        return None
    infos = {f"{path}.{part}": sizes.get(f"{path}.{part}") for part in ("weight", "scales", "biases")}
    lazy = {k: mx.zeros(i.shape, HEADER_DTYPES[i.dtype]) for k, i in infos.items() if i and i.dtype in HEADER_DTYPES}
    fmt = detect_mlx(path, shape[-1], lazy)
    return with_input_transform(path, shape, fmt, {}, hadamard=jang is not None and jang.hadamard)


def formats_from_headers(shapes: Mapping[str, Shape], sizes: Infos, jang: JangLabels | None) -> dict[str, Described]:
    """Main tensor -> its format, for all quantised matrices. `shapes` are those of the model's parameters."""
    found = {}
    for name in sizes:
        part = name.rpartition(".")[2]
        shape = shapes.get(module_path(name) + ".weight")
        if f".{part}" in MATRICES and shape is not None:
            fmt = format_from_headers(name, shape, sizes, jang)
            if fmt is not None:
                found[name] = fmt
    return found


def is_jangtq(fmt: Described, coding: str) -> bool:
    return isinstance(fmt, LUTFormat) and fmt.coding.name == coding


def describe_jang(found: Mapping[str, Described], jang: JangLabels | None) -> dict[str, Any] | None:
    """Format, profile and labels of a JANG checkpoint; None for any other without LUT or codebook matrices."""
    kinds: tuple[tuple[str, Callable[[Described], bool]], ...] = (
        ("JANGTQ", lambda fmt: is_jangtq(fmt, "jangtq")),
        ("JANGTQ 2", lambda fmt: is_jangtq(fmt, "jangtq2")),
        ("codebook VQ", lambda fmt: str(fmt).startswith("codebook")),
        ("JANG 1", lambda fmt: fmt == JANG1_STREAM),
    )
    names = [name for name, matches in kinds if any(map(matches, found.values()))]
    if jang is None and not names:
        return None
    return {
        "name": names[0] if names else "JANG 2",
        "profile": jang.profile if jang else None,
        "labels": jang.format if jang else None,
        "hadamard": bool(jang and jang.hadamard),
    }


def header_contradictions(found: dict[str, Described], config: Mapping[str, Any], jang: JangLabels | None) -> list[str]:
    """A line for every label that the headers contradict; `config` with our module names."""
    formats = {module_path(name): fmt for name, fmt in found.items() if isinstance(fmt, WeightFormat)}
    line = contradictions(config, {path: fmt for path, fmt in formats.items() if isinstance(fmt, MLXFormat)})
    return [*([line] if line else []), *(jang.contradictions(formats) if jang else ())]
