"""Which layout each module's tensors are in: told by their names and shapes, labels only where those are silent.

One line per format: the tensor that gives it away, and who reads it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...errors import BadCheckpoint, UnsupportedModel
from ...models.moe import ExpertLinear
from ..formats.codebook import read_vectors
from ..formats.hadamard import turned
from ..formats.jang.jangh import read_jangh
from ..formats.jang.jangtq import read_jangtq
from ..formats.jang.labels import Jang
from ..formats.quantized import layout_of
from ..formats.weight_format import Stored

Arrays = Mapping[str, mx.array]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Hints:
    """What is said of the tensors: config.json in our model's names, and a JANG bundle's labels."""

    config: Mapping[str, Any]
    jang: Jang | None


def read_mlx(path: str, shape: Shape, arrays: Arrays, hints: Hints) -> Stored:
    words = arrays.get(f"{path}.weight")
    if words is not None and words.shape[:-1] != shape[:-1]:
        expected = ", ".join([*map(str, shape[:-1]), "words"])
        raise BadCheckpoint(f"{path}.weight: expected shape [{expected}], found {list(words.shape)}")
    layout = layout_of(path, shape[-1], arrays)
    return turned(path, shape, layout, arrays, hadamard=hints.jang is not None and hints.jang.hadamard)


def read_first(path: str, shape: Shape, arrays: Arrays, hints: Hints) -> Stored:
    return read_jangtq(path, shape, arrays, (hints.jang or Jang({}, hints.config)).seed)


def read_second(path: str, shape: Shape, arrays: Arrays, hints: Hints) -> Stored:
    return read_jangh(path, shape, arrays, hints.config)


def read_codebook(path: str, shape: Shape, arrays: Arrays, hints: Hints) -> Stored:
    return read_vectors(path, shape, arrays)


def refuse_trellis(path: str, shape: Shape, arrays: Arrays, hints: Hints) -> Stored:
    raise UnsupportedModel(
        f"{path} is stored as JANGT (trellis codes), which mlxrt does not read; take a JANG, JANGTQ or MLX version"
    )


FORMS: dict[str, Callable[[str, Shape, Arrays, Hints], Stored]] = {
    ".scales": read_mlx,
    ".tq_packed": read_first,
    ".tq2_packed": read_second,
    ".codes": read_codebook,
    ".jt_packed": refuse_trellis,
}


def find_layouts(model: nn.Module, arrays: Arrays, hints: Hints) -> dict[str, Stored]:
    """The modules whose matrix is not plain."""
    found: dict[str, Stored] = {}
    modules = dict(model.named_modules())
    for suffix, read in FORMS.items():
        for path in [name.removesuffix(suffix) for name in arrays if name.endswith(suffix)]:
            if path not in modules:
                continue  # listed among the leftovers
            module = modules[path]
            if not isinstance(module, nn.Linear | nn.Embedding | ExpertLinear):
                raise UnsupportedModel(f"{path} is packed, but it is a {type(module).__name__}: only matrices can be")
            other = str(found[path]) if path in found else "weight" if f"{path}.weight" in arrays else None
            if other is not None and (path in found or suffix != ".scales"):
                raise BadCheckpoint(f"{path} is in the checkpoint twice: as {other} and as {suffix[1:]}; keep one")
            found[path] = read(path, module["weight"].shape, arrays, hints)
    return found
