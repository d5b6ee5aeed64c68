"""Random weights for a module of any architecture, made on the device in their final form.

A quantised matrix is drawn as packed bits: its float form, several times larger, never exists.
It knows modules and parameters, no model.
"""

import math
import random
from typing import TYPE_CHECKING

from ..errors import BadRequest

if TYPE_CHECKING:
    import mlx.core as mx
    import mlx.nn as nn

STD = 0.02  # of every matrix: what the families here are initialised with before training
BYTE_STD = math.sqrt((256**2 - 1) / 12)  # of a byte drawn evenly
E2M1_RMS = math.sqrt(sum(v * v for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)) / 8)  # of a 4-bit float drawn evenly
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
    """Fill a module that was built but never evaluated. The same seed gives the same weights.

    `dtype` (bfloat16 unless given) is that of everything floating: norms, scales, matrices that are not packed.
    """
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_flatten

    if mode not in MODES:
        raise BadRequest(f"random weights can be stored as {', '.join(MODES)}, not as {mode!r}")
    if bits is not None:
        # Lazy: every matrix gets its packed shape and nothing is computed, since all of it is replaced below.
        nn.quantize(model, group_size, bits, mode=mode, class_predicate=lambda _, module: packs(module, group_size))
    packed = {name: module for name, module in model.named_modules() if "scales" in module}
    # A packed matrix's biases follow from its scales, so they come last.
    flat: dict[str, mx.array] = dict(tree_flatten(model.parameters()))  # type: ignore[arg-type]
    parameters = sorted(flat.items(), key=lambda item: (item[0].endswith(".biases"), item[0]))
    made: dict[str, mx.array] = {}
    for name, old in parameters:
        owner, _, leaf = name.rpartition(".")
        luck = random.Random(f"{seed} {name}")  # of its own for each parameter: none depends on the others
        if owner in packed and leaf == "biases":
            made[name] = made[f"{owner}.scales"] * (-(2 ** packed[owner].bits - 1) / 2)
        elif owner in packed and leaf in ("weight", "scales"):
            made[name] = draw_packed(leaf, old.shape, packed[owner], luck, dtype or mx.bfloat16)
        else:
            made[name] = draw(leaf, old.shape, luck, dtype or mx.bfloat16)
        mx.eval(made[name])  # one by one: what a draw needs in between is freed before the next
    model.load_weights(list(made.items()))


def packs(module: "nn.Module", group_size: int) -> bool:
    """Whether MLX can quantise this module: rows must be whole groups."""
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % group_size == 0


def draw_packed(
    leaf: str, shape: tuple[int, ...], module: "nn.Module", luck: random.Random, dtype: "mx.Dtype"
) -> "mx.array":
    """Packed words of even bits, or the scales that give what they stand for the standard deviation STD."""
    import mlx.core as mx

    if leaf == "weight":
        return words(math.prod(shape), luck).reshape(shape)
    if module.mode == "mxfp4":
        return mx.full(shape, E8M0_BIAS + round(math.log2(STD / E2M1_RMS)), dtype=mx.uint8)
    scale = STD / math.sqrt((4**module.bits - 1) / 12)
    # Not all alike: a kernel that reads the wrong group's scale must give another answer.
    key = mx.random.key(luck.getrandbits(64))
    return mx.random.uniform(0.75 * scale, 1.25 * scale, shape, key=key).astype(dtype)


def draw(leaf: str, shape: tuple[int, ...], luck: random.Random, dtype: "mx.Dtype") -> "mx.array":
    """Ones for what scales (norms, a layer's one factor), even numbers around zero for all else.

    A factor near zero makes a sum of layers so small that the next norm blows its rounding up, tenfold a layer: then
    two right engines give different tokens.
    """
    import mlx.core as mx

    if shape == (1,) or (len(shape) <= 1 and leaf == "weight"):
        return mx.ones(shape, dtype=dtype)
    count = math.prod(shape)
    drawn = mx.view(words(-(-count // 4), luck), mx.uint8)[:count].reshape(shape)
    return (drawn.astype(dtype) - 127.5) * (STD / BYTE_STD)


def words(count: int, luck: random.Random) -> "mx.array":
    """Even 32-bit words: a hash of a counter. MLX draws integers through floats: 24 good bits, twice the memory."""
    import mlx.core as mx

    x = mx.arange(count, dtype=mx.uint32)
    for _ in range(2):
        x = x + mx.array(luck.getrandbits(32), dtype=mx.uint32)
        x = (x ^ (x >> 16)) * mx.array(0x7FEB352D, dtype=mx.uint32)
        x = (x ^ (x >> 15)) * mx.array(0x846CA68B, dtype=mx.uint32)
        x = x ^ (x >> 16)
    return x
