"""What top-k, top-p and min-p leave of some rows of logits, and one draw from it.

Arrays in, arrays out, every row for itself: nothing here knows a sequence, a parameter object or a step. Sums that
decide about a token are running sums: their rounding depends on the length of a row only, never on how many rows
there are.
"""

from dataclasses import dataclass

import mlx.core as mx

BLOCK = 512  # a draw is one of the blocks, then one in the block: float32 sums of this length lose nothing that counts
MASK = 2**64 - 1
WEYL = 0x9E3779B97F4A7C15  # splitmix64's increment


@dataclass(frozen=True)
class FilteredLogits:
    """What top-k, top-p and min-p leave: values in rising order, and which of the ids with the lowest one stay."""

    values: mx.array  # [G, n]
    mass: mx.array  # [G, n], 0 where cut away
    cut: mx.array  # [G, 1] the lowest value that top-k and top-p keep
    ties: mx.array  # int32 [G, 1] how many ids with that value they keep: those with the lowest ids, as argmax would

    def token(self, x: mx.array, slot: mx.array, u: mx.array) -> mx.array:
        """The id behind a slot: ids of equal value are equally likely, so any of those kept will do."""
        value = mx.take_along_axis(self.values, slot[:, None], axis=-1)
        same = (x == value).astype(mx.int32)
        upto = mx.cumsum(same, axis=-1)  # ids with that value, this one and earlier ones
        n = mx.where(value == self.cut, self.ties, upto[:, -1:])
        r = mx.minimum(mx.floor(u * n).astype(mx.int32), n - 1)
        return mx.minimum(mx.sum(upto <= r, axis=-1), x.shape[-1] - 1)


def filter_logits(x: mx.array, top_k: int, rest: mx.array | None, min_p: mx.array) -> FilteredLogits:
    """top_k 0: all. rest [G, 1]: the mass below the nucleus, 1 - top_p; None: no nucleus."""
    values = mx.sort(mx.topk(x, top_k, axis=-1) if top_k else x, axis=-1)
    weight = mx.exp(values - values[:, -1:])
    lowest, light = values[:, :1], weight[:, :1]
    # Ids that equal the k-th best but found no slot among the k: HF keeps them.
    extra = tally(x == lowest) - tally(values == lowest)
    cut, ties, mass = lowest, tally(x == lowest), weight
    if rest is not None:
        below = extra * light + mx.cumsum(weight, axis=-1)
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
    return mx.sum(x, axis=-1, keepdims=True).astype(mx.int32)  # whole numbers: exact in any order


def pick(mass: mx.array, u: mx.array) -> mx.array:
    """An index per row of mass [G, n], each as likely as its mass: a block by u[:, 0], one inside it by u[:, 1]."""
    g, n = mass.shape
    if spare := -n % BLOCK:
        mass = mx.pad(mass, [(0, 0), (0, spare)])
    blocks = mass.reshape(g, -1, BLOCK)
    if blocks.shape[1] == 1:
        # The last of each block's sums would be a [1, 1] array with a stride of BLOCK: MLX on CUDA scans it by that
        # stride and writes outside of its buffer.
        return mx.minimum(invert(mass, u[:, 1:2]), n - 1)[:, 0]
    block = invert(mx.cumsum(blocks, axis=-1)[..., -1], u[:, :1])  # [G, 1]
    inside = invert(mx.take_along_axis(blocks, block[..., None], axis=1)[:, 0], u[:, 1:2])
    return mx.minimum(block * BLOCK + inside, n - 1)[:, 0]


def invert(mass: mx.array, u: mx.array) -> mx.array:
    """The first index [G, 1] where the running sum of mass passes u of the total, never one without mass."""
    total = mx.cumsum(mass, axis=-1)
    # A parallel sum may round so that it rises over an empty entry, or never passes the target.
    hit = (total > u * total[:, -1:]) & (mass > 0)
    first = mx.argmax(hit, axis=-1, keepdims=True)
    found = mx.take_along_axis(hit, first, axis=-1)
    return mx.where(found, first, mx.argmax(mass, axis=-1, keepdims=True))


def uniforms(seed: int, position: int) -> list[float]:
    """Three numbers in [0, 1) of 24 bits, for one token of one seed: splitmix64, its stream begun at the mixed seed.

    On the host: a draw needs no more than these, and they are the same on every device and in every batch.
    """
    start = mix(seed + WEYL)
    return [(mix(start + (3 * position + j + 1) * WEYL) >> 40) / 2**24 for j in range(3)]


def mix(z: int) -> int:
    z &= MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)
