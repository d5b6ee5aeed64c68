"""Quantisers: MLX's affine format, JANGTQ and codebook VQ. Stacks of experts are encoded one by one, for memory."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np

from ...kernels.ops.bitpack import pack_aligned
from ...models.quantized.lut_linear import LUTEncoding
from ...models.quantized.rotation import Rotation, binary_blocks, rotate

Arrays = dict[str, mx.array]
SEED = 42
KMEANS_ROUNDS, KMEANS_SAMPLE, BATCH = 12, 1 << 15, 1 << 9


def each_expert(w: mx.array, encode: Callable[[mx.array], Arrays]) -> Arrays:
    if w.ndim == 2:
        return encode(w)
    made = []
    for expert in w:
        made.append(encode(expert))
        mx.eval(made[-1])
    return {name: mx.stack([one[name] for one in made]) for name in made[0]}


def affine(w: mx.array, bits: int, group_size: int, dtype: mx.Dtype, rotation: Rotation | None = None) -> Arrays:
    """MLX's own quantiser, after the rotation where one is given."""

    def encode(rows: mx.array) -> Arrays:
        if rotation is not None:
            rows = rotate(rows, rotation.blocks, rotation.signs())
        packed, scales, biases = mx.quantize(rows.astype(dtype), group_size, bits)
        return {"weight": packed, "scales": scales, "biases": biases}

    return each_expert(w, encode)


def jangtq(w: mx.array, bits: int) -> Arrays:
    """Centroid indices and norms of rotated rows: an index counts the borders between centroids below the value."""
    coding = LUTEncoding.jangtq(bits, w.shape[-1], SEED)
    centroids = mx.array(coding.centroids)
    borders = (centroids[:-1] + centroids[1:]) / 2.0

    def encode(rows: mx.array) -> Arrays:
        assert coding.rotation is not None
        rotated = rotate(rows, coding.rotation.blocks, coding.rotation.signs())
        norms = mx.sqrt(mx.sum(rotated * rotated, axis=1, keepdims=True))
        unit = rotated / mx.maximum(norms, 1e-10)
        indices = mx.zeros(unit.shape, mx.uint32)
        for border in borders:
            indices = indices + (unit > border).astype(mx.uint32)
        return {"tq_packed": pack_aligned(indices, bits), "tq_norms": norms.squeeze(-1).astype(mx.float16)}

    return each_expert(w, encode) | {"tq_bits": mx.array([bits], mx.uint8)}


def codebook(w: mx.array, length: int, max_vectors: int, importance: mx.array) -> Arrays:
    """Vectors shared by all rows (and experts), and the index of the nearest one for every `length` weights.

    `importance` [in] weights errors by column. At most one vector per 16 indices: a table of that size still costs less
    than the indices.
    """
    vectors = w.astype(mx.float32).reshape(-1, length)
    costs = importance.reshape(-1, length)  # the same for every row
    count = min(max_vectors, 1 << max(1, (vectors.shape[0] // 16).bit_length() - 1))
    book = learn_codebook(vectors, costs, count)
    indices = nearest(vectors, mx.arange(vectors.shape[0]), costs, book.astype(mx.float32))
    return {"codebook": book, "indices": indices.astype(mx.uint16).reshape(*w.shape[:-1], -1)}


def learn_codebook(vectors: mx.array, costs: mx.array, count: int) -> mx.array:
    """k-means, float16 [count, length]. Empty clusters restart at a random sample.

    A few weights of a model are thirty times as large as the others and matter most, and a random initialisation has
    none of them. So the vectors that cost most are in the sample, and half of the clusters start there.
    """
    rng = np.random.default_rng(SEED)
    rows = mx.arange(vectors.shape[0]) % costs.shape[0]
    sizes = np.array((vectors * vectors * costs[rows]).sum(axis=1))
    costliest = np.argsort(-sizes, kind="stable")[: max(1, count // 2)]
    chosen = rng.permutation(vectors.shape[0])[: max(KMEANS_SAMPLE, 8 * count)]
    at = mx.array(np.concatenate([costliest, chosen]))
    values, weights = np.array(vectors[at]), np.array(costs[rows[at]])
    book = values[:count].copy()
    for _ in range(KMEANS_ROUNDS):
        indices = np.array(nearest(vectors, at, costs, mx.array(book)))
        totals, sums = (
            np.stack([np.bincount(indices, column, count) for column in what.T], axis=1)
            for what in (weights, weights * values)
        )
        book = np.where(totals > 0, sums / np.maximum(totals, 1e-30), 0).astype(np.float32)
        if (empty := np.flatnonzero(totals[:, 0] == 0)).size:
            book[empty] = values[rng.integers(0, len(values), empty.size)]
    return mx.array(book).astype(mx.float16)


def nearest(vectors: mx.array, at: mx.array, costs: mx.array, book: mx.array) -> mx.array:
    """The index of the best codebook vector c for vectors x `at`: argmax of the sum of cost (2 x - c) c."""
    both = mx.concatenate([2 * book, -book * book], axis=1).T
    found = []
    for i in range(0, at.shape[0], BATCH):
        some = at[i : i + BATCH]
        cost = costs[some % costs.shape[0]]
        found.append(mx.argmax(mx.concatenate([vectors[some] * cost, cost], axis=1) @ both, axis=1))
        mx.eval(found[-1])
    return mx.concatenate(found)


def hadamard_rotation(width: int) -> Rotation:
    """As JANG's `hadamard_rotation`."""
    return Rotation(binary_blocks(width), SEED)
