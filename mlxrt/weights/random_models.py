"""`shape:NAME[@4bit]`: published architectures with random weights, for measuring speed and memory.

A shape has a config and a weight format, no files and no tokenizer. Weights are made on the device in their final form:
of a quantised matrix random packed bits, so that its float form, several times larger, never exists.
"""

import copy
import functools
import json
import math
import random
import re
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from ..errors import BadRequest, ModelNotFound

if TYPE_CHECKING:
    import mlx.core as mx
    import mlx.nn as nn


BITS = (2, 3, 4, 5, 6, 8)
SUFFIX = re.compile(r"(?P<bits>\d+)bit|(?P<mode>mxfp4)")


@dataclass(frozen=True)
class Shape:
    """A published architecture and its weight format; `bits` None: unquantised."""

    name: str
    bits: int | None = None
    mode: str = "affine"
    group_size: int = 64

    @classmethod
    def parse(cls, name: str) -> "Shape":
        """From `shape:NAME`, `shape:NAME@4bit` or `shape:NAME@mxfp4`."""
        plain, at, suffix = name.removeprefix("shape:").partition("@")
        shape_config(plain)
        if not at:
            return cls(plain)
        found = SUFFIX.fullmatch(suffix)
        if found is None or (found["bits"] and int(found["bits"]) not in BITS):
            widths = ", ".join(f"@{bits}bit" for bits in BITS)
            raise BadRequest(f"{name} has the unknown weight format {suffix!r}; known: {widths} and @mxfp4")
        return cls(plain, 4, "mxfp4", 32) if found["mode"] else cls(plain, int(found["bits"]))

    @property
    def config(self) -> dict[str, Any]:
        return shape_config(self.name)


@functools.cache
def published_configs() -> dict[str, dict[str, Any]]:
    """By name, the config.json of the text model without what changes neither shape nor arithmetic."""
    return json.loads((files(__package__) / "published.json").read_bytes())


def shape_config(name: str) -> dict[str, Any]:
    """A copy: readers may remove keys."""
    if name not in (known := published_configs()):
        raise ModelNotFound(f"there is no shape {name!r}; known: {', '.join(sorted(known))}")
    return copy.deepcopy(known[name])


STD = 0.02  # of every matrix, as at initialisation before training
BYTE_STD = math.sqrt((256**2 - 1) / 12)  # of a uniform byte
E2M1_RMS = math.sqrt(sum(v * v for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)) / 8)  # of a uniform 4-bit float
E8M0_BIAS = 127
MODES = ("affine", "mxfp4")


def random_weights(
    model: "nn.Module",
    bits: int | None = None,
    dtype: "mx.Dtype | None" = None,
    *,
    mode: str = "affine",
    group_size: int = 64,
    seed: int = 0,
) -> None:
    """Set random weights in a module that was built but never evaluated. The same seed gives the same weights.

    `dtype` (bfloat16 unless given) is that of all floats: norms, scales, unquantised matrices.
    """
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_flatten

    if mode not in MODES:
        raise BadRequest(f"random weights can be stored as {', '.join(MODES)}, not as {mode!r}")
    if bits is not None:
        # Lazy: matrices get their packed shapes, nothing is computed, all of it is replaced below.
        nn.quantize(model, group_size, bits, mode=mode, class_predicate=lambda _, m: is_quantizable(m, group_size))
    packed = {name: module for name, module in model.named_modules() if "scales" in module}
    # A packed matrix's biases follow from its scales, so they come last.
    flat: dict[str, mx.array] = dict(tree_flatten(model.parameters()))  # type: ignore[arg-type]
    parameters = sorted(flat.items(), key=lambda item: (item[0].endswith(".biases"), item[0]))
    made: dict[str, mx.array] = {}
    for name, old in parameters:
        owner, _, leaf = name.rpartition(".")
        rng = random.Random(f"{seed} {name}")  # one per parameter: none depends on the others
        if owner in packed and leaf == "biases":
            made[name] = made[f"{owner}.scales"] * (-(2 ** packed[owner].bits - 1) / 2)
        elif owner in packed and leaf in ("weight", "scales"):
            made[name] = random_packed(leaf, old.shape, packed[owner], rng, dtype or mx.bfloat16)
        else:
            made[name] = random_floats(leaf, old.shape, rng, dtype or mx.bfloat16)
        mx.eval(made[name])  # one by one, to free the temporaries
    model.load_weights(list(made.items()))


def is_quantizable(module: "nn.Module", group_size: int) -> bool:
    """Whether MLX can quantise this module: rows must consist of full groups."""
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % group_size == 0


def random_packed(
    leaf: str, shape: tuple[int, ...], module: "nn.Module", rng: random.Random, dtype: "mx.Dtype"
) -> "mx.array":
    """Uniform packed bits, or the scales that give the weights the standard deviation STD."""
    import mlx.core as mx

    if leaf == "weight":
        return uniform_uint32(math.prod(shape), rng).reshape(shape)
    if module.mode == "mxfp4":
        return mx.full(shape, E8M0_BIAS + round(math.log2(STD / E2M1_RMS)), dtype=mx.uint8)
    scale = STD / math.sqrt((4**module.bits - 1) / 12)
    # Not all equal: a kernel that reads the wrong group's scale must give another result.
    key = mx.random.key(rng.getrandbits(64))
    return mx.random.uniform(0.75 * scale, 1.25 * scale, shape, key=key).astype(dtype)


def random_floats(leaf: str, shape: tuple[int, ...], rng: random.Random, dtype: "mx.Dtype") -> "mx.array":
    """Ones for norms and scalar factors, uniform values around zero for all else.

    A factor near zero would make the residual so small that the next norm amplifies rounding, tenfold per layer: two
    correct engines would then give different tokens.
    """
    import mlx.core as mx

    if shape == (1,) or (len(shape) <= 1 and leaf == "weight"):
        return mx.ones(shape, dtype=dtype)
    count = math.prod(shape)
    drawn = mx.view(uniform_uint32(-(-count // 4), rng), mx.uint8)[:count].reshape(shape)
    return (drawn.astype(dtype) - 127.5) * (STD / BYTE_STD)


def uniform_uint32(count: int, rng: random.Random) -> "mx.array":
    """Uniform integers, by hashing a counter. MLX draws integers through floats: 24 random bits, twice the memory."""
    import mlx.core as mx

    x = mx.arange(count, dtype=mx.uint32)
    for _ in range(2):
        x = x + mx.array(rng.getrandbits(32), dtype=mx.uint32)
        x = (x ^ (x >> 16)) * mx.array(0x7FEB352D, dtype=mx.uint32)
        x = (x ^ (x >> 15)) * mx.array(0x846CA68B, dtype=mx.uint32)
        x = x ^ (x >> 16)
    return x
