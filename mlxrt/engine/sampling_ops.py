"""Top-k, top-p and min-p filtering of rows of logits, and sampling one token per row.

Arrays in, arrays out; rows are independent. Sums that decide about a token are cumulative sums: their rounding depends
on the length of a row, never on the number of rows.
"""

from dataclasses import dataclass

import mlx.core as mx

from ..kernels.mlx_defects import cumsum

BLOCK = 512  # sampling picks a block, then an element of it: float32 sums of this length are precise enough
MASK = 2**64 - 1
WEYL = 0x9E3779B97F4A7C15  # splitmix64's increment


@dataclass(frozen=True)
class FilteredLogits:
    """Logits after top-k, top-p and min-p: values in ascending order, and how many ids tied at the lowest one stay."""

    values: mx.array  # [G, n]
    mass: mx.array  # [G, n], 0 where filtered out
    cut: mx.array  # [G, 1] the lowest value that top-k and top-p keep
    ties: mx.array  # int32 [G, 1] how many ids with that value they keep: those with the lowest ids, as argmax would

    def token(self, x: mx.array, slot: mx.array, u: mx.array) -> mx.array:
        """The id of a slot. Ids of equal value are equally likely, so any of those that stay may be taken."""
        value = mx.take_along_axis(self.values, slot[:, None], axis=-1)
        same = (x == value).astype(mx.int32)
        upto = cumsum(same, axis=-1)  # ids with that value, this one and earlier ones
        n = mx.where(value == self.cut, self.ties, upto[:, -1:])
        r = mx.minimum(mx.floor(u * n).astype(mx.int32), n - 1)
        return mx.minimum(mx.sum(upto <= r, axis=-1), x.shape[-1] - 1)


def filter_logits(x: mx.array, top_k: int, rest: mx.array | None, min_p: mx.array) -> FilteredLogits:
    """`top_k` 0: no top-k. `rest` [G, 1]: the mass outside of the nucleus, 1 - top_p; None: no top-p."""
    values = mx.sort(mx.topk(x, top_k, axis=-1) if top_k else x, axis=-1)
    weight = mx.exp(values - values[:, -1:])
    lowest, light = values[:, :1], weight[:, :1]
    # Ids tied with the k-th best that are not among the k: Hugging Face keeps them.
    extra = tally(x == lowest) - tally(values == lowest)
    cut, ties, mass = lowest, tally(x == lowest), weight
    if rest is not None:
        below = extra * light + cumsum(weight, axis=-1)
        limit = rest * below[:, -1:]
        n = values.shape[-1]
        first = mx.argmax((below > limit) | (mx.arange(n) == n - 1), axis=-1)[:, None]
        stays = mx.arange(n) >= first
        gone = mx.floor(mx.minimum(extra, limit / light)).astype(mx.int32)
        extra = mx.where(first == 0, extra - gone, 0)
        cut = mx.take_along_axis(values, first, axis=-1)
        ties = tally(stays & (values == cut)) + extra
        mass = mx.where(stays, weight, 0.0)
    mass = mx.concatenate([mass[:, :1] + extra * light, mass[:, 1:]], axis=-1) if top_k else mass
    return FilteredLogits(values, mx.where(weight < min_p, 0.0, mass), cut, ties)


def tally(x: mx.array) -> mx.array:
    return mx.sum(x, axis=-1, keepdims=True).astype(mx.int32)  # integers: exact in any order


def pick(mass: mx.array, u: mx.array) -> mx.array:
    """Sample an index per row of mass [G, n], in proportion to mass: a block by u[:, 0], then inside it by u[:, 1]."""
    g, n = mass.shape
    if spare := -n % BLOCK:
        mass = mx.pad(mass, [(0, 0), (0, spare)])
    blocks = mass.reshape(g, -1, BLOCK)
    if blocks.shape[1] == 1:
        # The last of each block's sums would be a [1, 1] array with a stride of BLOCK: MLX on CUDA scans it by that
        # stride and writes outside of its buffer.
        return mx.minimum(invert(mass, u[:, 1:2]), n - 1)[:, 0]
    block = invert(cumsum(blocks, axis=-1)[..., -1], u[:, :1])  # [G, 1]
    inside = invert(mx.take_along_axis(blocks, block[..., None], axis=1)[:, 0], u[:, 1:2])
    return mx.minimum(block * BLOCK + inside, n - 1)[:, 0]


def invert(mass: mx.array, u: mx.array) -> mx.array:
    """Inverse CDF: the first index [G, 1] where the cumulative mass exceeds u of the total, never one without mass."""
    total = cumsum(mass, axis=-1)
    # A parallel sum may round so that it rises at an entry without mass, or never exceeds the target.
    hit = (total > u * total[:, -1:]) & (mass > 0)
    first = mx.argmax(hit, axis=-1, keepdims=True)
    found = mx.take_along_axis(hit, first, axis=-1)
    return mx.where(found, first, mx.argmax(mass, axis=-1, keepdims=True))


def uniforms(seed: int, position: int) -> list[float]:
    """Three uniform numbers in [0, 1) of 24 bits for one token of one seed: splitmix64, started at the mixed seed.

    On the host: one token needs no more than these, and they are the same on every device and in every batch.
    """
    start = mix(seed + WEYL)
    return [(mix(start + (3 * position + j + 1) * WEYL) >> 40) / 2**24 for j in range(3)]


def mix(z: int) -> int:
    z &= MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)
