"""Matrices into their stored form: MLX's affine words, JANGTQ codes, codebooks. The inverse of what loading reads.

Knows numbers, no names. A stack of experts is encoded expert by expert: what is in between never grows with it.
"""

from collections.abc import Callable

import mlx.core as mx
import numpy as np

from ...kernels.ops.bitpack import pack_aligned
from ...models.quantized.lut_linear import Coding
from ...models.quantized.rotation import Rotation, binary_blocks, rotate

Arrays = dict[str, mx.array]
SEED = 42
ROUNDS, SAMPLE, AT_ONCE = 12, 1 << 15, 1 << 9


def each_expert(w: mx.array, encode: Callable[[mx.array], Arrays]) -> Arrays:
    if w.ndim == 2:
        return encode(w)
    made = []
    for expert in w:
        made.append(encode(expert))
        mx.eval(made[-1])
    return {name: mx.stack([one[name] for one in made]) for name in made[0]}


def affine(w: mx.array, bits: int, group: int, dtype: mx.Dtype, rotation: Rotation | None = None) -> Arrays:
    """Words, scales and biases of MLX's own quantiser; turned first where a rotation is given."""

    def encode(rows: mx.array) -> Arrays:
        if rotation is not None:
            rows = rotate(rows, rotation.blocks, rotation.signs())
        words, scales, biases = mx.quantize(rows.astype(dtype), group, bits)
        return {"weight": words, "scales": scales, "biases": biases}

    return each_expert(w, encode)


def jangtq(w: mx.array, bits: int) -> Arrays:
    """Codes and norms in the turned basis: a code is the number of borders between levels below its value."""
    coding = Coding.jangtq(bits, w.shape[-1], SEED)
    levels = mx.array(coding.levels)
    borders = (levels[:-1] + levels[1:]) / 2.0

    def encode(rows: mx.array) -> Arrays:
        assert coding.rotation is not None
        turned = rotate(rows, coding.rotation.blocks, coding.rotation.signs())
        norms = mx.sqrt(mx.sum(turned * turned, axis=1, keepdims=True))
        unit = turned / mx.maximum(norms, 1e-10)
        codes = mx.zeros(unit.shape, mx.uint32)
        for border in borders:
            codes = codes + (unit > border).astype(mx.uint32)
        return {"tq_packed": pack_aligned(codes, bits), "tq_norms": norms.squeeze(-1).astype(mx.float16)}

    return each_expert(w, encode) | {"tq_bits": mx.array([bits], mx.uint8)}


def codebook(w: mx.array, length: int, most: int, counts: mx.array) -> Arrays:
    """Vectors shared by all rows (and experts), and the nearest one's number for every run of `length` weights.

    `counts` [in]: how much an error in each column costs. No more vectors than a sixteenth of the runs: a table of that
    size still costs less than the numbers.
    """
    runs = w.astype(mx.float32).reshape(-1, length)
    costs = counts.reshape(-1, length)  # of the runs of one row, and so of every row
    count = min(most, 1 << max(1, (runs.shape[0] // 16).bit_length() - 1))
    book = learn(runs, costs, count)
    codes = nearest(runs, mx.arange(runs.shape[0]), costs, book.astype(mx.float32))
    return {"codebook": book, "indices": codes.astype(mx.uint16).reshape(*w.shape[:-1], -1)}


def learn(runs: mx.array, costs: mx.array, count: int) -> mx.array:
    """k-means, float16 [count, length]. Vectors that nothing is near to start again at a run drawn at random.

    A few weights of a model are thirty times as large as the others and matter more than all of them; drawn at random
    no vector begins near one. So the runs that cost most are in the sample, and half of the vectors begin there.
    """
    draw = np.random.default_rng(SEED)
    rows = mx.arange(runs.shape[0]) % costs.shape[0]
    sizes = np.array((runs * runs * costs[rows]).sum(axis=1))
    longest = np.argsort(-sizes, kind="stable")[: max(1, count // 2)]
    chosen = draw.permutation(runs.shape[0])[: max(SAMPLE, 8 * count)]
    at = mx.array(np.concatenate([longest, chosen]))
    values, weights = np.array(runs[at]), np.array(costs[rows[at]])
    book = values[:count].copy()
    for _ in range(ROUNDS):
        codes = np.array(nearest(runs, at, costs, mx.array(book)))
        totals, sums = (
            np.stack([np.bincount(codes, column, count) for column in what.T], axis=1)
            for what in (weights, weights * values)
        )
        book = np.where(totals > 0, sums / np.maximum(totals, 1e-30), 0).astype(np.float32)
        if (empty := np.flatnonzero(totals[:, 0] == 0)).size:
            book[empty] = values[draw.integers(0, len(values), empty.size)]
    return mx.array(book).astype(mx.float16)


def nearest(runs: mx.array, at: mx.array, costs: mx.array, book: mx.array) -> mx.array:
    """The number of the vector that costs least, for runs `at`: the largest of the sum of cost (2 x - c) c."""
    both = mx.concatenate([2 * book, -book * book], axis=1).T
    found = []
    for i in range(0, at.shape[0], AT_ONCE):
        some = at[i : i + AT_ONCE]
        cost = costs[some % costs.shape[0]]
        found.append(mx.argmax(mx.concatenate([runs[some] * cost, cost], axis=1) @ both, axis=1))
        mx.eval(found[-1])
    return mx.concatenate(found)


def turning(width: int) -> Rotation:
    """JANG's hadamard_rotation."""
    return Rotation(binary_blocks(width), SEED)
