"""Packs unsigned integers of a few bits into uint32, in both ways checkpoints do: as one bit stream, or aligned, so that
no value crosses a word."""

from functools import reduce

import mlx.core as mx

WORD = 32


def unpack_bits(words: mx.array, bits: int) -> mx.array:
    """uint32 [..., n] -> its values [..., n * 32 / bits]: a bit stream, the lowest first."""
    if WORD % bits == 0:
        each = (words[..., None] >> mx.arange(0, WORD, bits, dtype=mx.uint32)) & mx.array((1 << bits) - 1, mx.uint32)
        return each.flatten(-2)
    runs = words.reshape(*words.shape[:-1], -1, bits)  # of 32 values
    values = []
    for n in range(WORD):
        word, bit = divmod(n * bits, WORD)
        value = runs[..., word] >> bit
        if bit + bits > WORD:
            value = value | (runs[..., word + 1] << (WORD - bit))
        values.append(value)
    return (mx.stack(values, axis=-1) & mx.array((1 << bits) - 1, mx.uint32)).flatten(-2)


def pack_bits(values: mx.array, bits: int) -> mx.array:
    """Values [..., n] of fewer than `bits` bits -> words [..., n * bits / 32], as unpack_bits reads them."""
    run = WORD // bits if WORD % bits == 0 else WORD  # values that fill whole words
    runs = values.reshape(*values.shape[:-1], -1, run)
    words = []
    for word in range(run * bits // WORD):
        first, last = word * WORD // bits, (word * WORD + WORD - 1) // bits
        fields = [shift_left(runs[..., n].astype(mx.uint32), n * bits - word * WORD) for n in range(first, last + 1)]
        words.append(reduce(mx.bitwise_or, fields))
    return mx.stack(words, axis=-1).flatten(-2)


def shift_left(words: mx.array, bits: int) -> mx.array:
    """To the right where `bits` is negative."""
    return words << bits if bits >= 0 else words >> -bits


def aligned_words(count: int, bits: int) -> int:
    """Words that hold `count` values, none across a word."""
    return -(-count // (WORD // bits))


def unpack_aligned(words: mx.array, bits: int, count: int) -> mx.array:
    """uint32 [..., n] -> its first `count` values: 32 // bits of them in a word, the lowest first."""
    each = (words[..., None] >> bit_offsets(bits)) & mx.array((1 << bits) - 1, mx.uint32)
    return each.flatten(-2)[..., :count]


def pack_aligned(values: mx.array, bits: int) -> mx.array:
    """Values [..., n] -> words, as unpack_aligned reads them; the last word is padded with zeros."""
    each = WORD // bits
    padding = aligned_words(values.shape[-1], bits) * each - values.shape[-1]
    values = mx.pad(values.astype(mx.uint32), [(0, 0)] * (values.ndim - 1) + [(0, padding)])
    return (values.reshape(*values.shape[:-1], -1, each) << bit_offsets(bits)).sum(axis=-1).astype(mx.uint32)


def bit_offsets(bits: int) -> mx.array:
    """Where the values of a word begin."""
    return mx.arange(WORD // bits, dtype=mx.uint32) * bits
