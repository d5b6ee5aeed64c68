"""What a checkpoint's headers alone tell of how its matrices are stored: for `mlxrt info`, which loads nothing.

Widths come from the model, so most layouts follow from shapes; what only values tell (turning, norms) is not said.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx

from ...kernels.ops.bitpack import aligned_words
from ...models.quantized.centroids import CUBIC
from ...models.quantized.lut_linear import Coding
from ..formats.checkpoint import TensorInfo
from ..formats.hadamard import DIVISORS, turned
from ..formats.jang.jangtq import BITS, PARTS, PARTS2, Coded
from ..formats.jang.labels import Jang
from ..formats.quantized import Layout, contradictions, layout_of
from ..formats.weight_format import Stored

TYPES = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16, "U32": mx.uint32, "U8": mx.uint8}
# Tensors that belong to another one: they are counted with it, not beside it.
BESIDE = (
    ".scales", ".biases", ".tq_norms", ".tq_bits", ".tq2_scales", ".codebook", ".qzeros", ".zeros", ".bits", ".bit_map",
    ".block_offsets", ".shape", ".importance", *(f".{name}" for name in DIVISORS),
)  # fmt: skip
SINGLE = re.compile(r"(\bexperts)\.\d+\.")
NAMES: tuple[tuple[str, Callable[[Stored | str], bool]], ...] = (
    ("JANGTQ", lambda how: isinstance(how, Coded) and how.coding.name == "jangtq"),
    ("JANGTQ 2", lambda how: isinstance(how, Coded) and how.coding.name == "jangtq2"),
    ("codebook VQ", lambda how: str(how).startswith("codebook")),
    ("JANG 1", lambda how: how == STREAM),
)
STREAM = "JANG 1 stream"
MAIN = (".weight", ".tq_packed", ".tq2_packed", ".codes", ".qweight")


def module_of(name: str) -> str:
    """Whose tensor it is; experts that are stored one by one are one module."""
    return SINGLE.sub(r"\1.", name.rpartition(".")[0])


def stored_as(
    name: str, shape: tuple[int, ...], sizes: Mapping[str, TensorInfo], jang: Jang | None
) -> Stored | str | None:
    """How the matrix of `shape` is stored whose main tensor is `name`; None for a plain one."""
    path, _, part = name.rpartition(".")
    info = sizes[name]
    if part == "weight":
        return affine(path, shape, sizes, jang)
    if part == "tq_packed":
        bits = next((b for b in BITS if aligned_words(shape[-1], b) == info.shape[-1]), None)
        return Coded(Coding.jangtq(bits, shape[-1], jang.seed if jang else 42), PARTS) if bits else "jangtq"
    if part == "tq2_packed":
        bits = 32 * info.shape[-1] // shape[-1]
        return Coded(Coding.jangtq2(bits, shape[-1], turned=True), PARTS2) if bits in CUBIC else "jangtq2"
    if part == "codes" and (book := sizes.get(f"{path}.codebook")) and len(book.shape) == 2:
        return f"codebook of {book.shape[0]} x {book.shape[1]}"
    if part == "qweight" and info.dtype == "U8":
        return STREAM
    return None


def affine(path: str, shape: tuple[int, ...], sizes: Mapping[str, TensorInfo], jang: Jang | None) -> Stored | None:
    if f"{path}.scales" not in sizes:
        return None
    described = {f"{path}.{part}": sizes.get(f"{path}.{part}") for part in ("weight", "scales", "biases", *DIVISORS)}
    lazy = {k: mx.zeros(i.shape, TYPES[i.dtype]) for k, i in described.items() if i and i.dtype in TYPES}
    layout = layout_of(path, shape[-1], {k: a for k, a in lazy.items() if not k.endswith(DIVISORS)})
    return turned(path, shape, layout, {}, hadamard=jang is not None and jang.hadamard)


def layouts_told(
    shapes: Mapping[str, tuple[int, ...]], sizes: Mapping[str, TensorInfo], jang: Jang | None
) -> dict[str, Stored | str]:
    """Main tensor -> how its matrix is stored, for all that are not plain. `shapes` are the model's parameters."""
    found = {}
    for name in sizes:
        part = name.rpartition(".")[2]
        whole = shapes.get(module_of(name) + ".weight")
        if f".{part}" in MAIN and whole is not None and (how := stored_as(name, whole, sizes, jang)) is not None:
            found[name] = how
    return found


def told_format(found: Mapping[str, Stored | str], jang: Jang | None) -> dict[str, Any] | None:
    """Format, profile and labels of a bundle; None for a model that is no bundle and has no codes."""
    names = [name for name, is_it in NAMES if any(is_it(how) for how in found.values())]
    if jang is None and not names:
        return None
    return {
        "name": names[0] if names else "JANG 2",
        "profile": jang.profile if jang else None,
        "labels": jang.format if jang else None,
        "hadamard": bool(jang and jang.hadamard),
    }


def refuted(found: Mapping[str, Stored | str], config: Mapping[str, Any], jang: Jang | None) -> list[str]:
    """A line for every label that the headers refute; `config` in our model's names."""
    stored = {module_of(name): how for name, how in found.items() if isinstance(how, Stored)}
    line = contradictions(config, {path: how for path, how in stored.items() if isinstance(how, Layout)})
    return [*([line] if line else []), *(jang.contradictions(stored) if jang else ())]
