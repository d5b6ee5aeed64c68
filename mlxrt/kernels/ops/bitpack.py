"""Packs unsigned integers of a few bits into uint32, in both ways checkpoints do: as one bit stream, or aligned, so that
no value crosses a word."""

import mlx.core as mx

WORD = 32


def unpack_bits(words: mx.array, bits: int) -> mx.array:
    """uint32 [..., n] -> its values [..., n * 32 / bits]: a bit stream, the lowest first."""
    if WORD % bits == 0:
        each = (words[..., None] >> mx.arange(0, WORD, bits, dtype=mx.uint32)) & mx.array((1 << bits) - 1, mx.uint32)
        return each.flatten(-2)
    stream = ((words[..., None] >> mx.arange(WORD, dtype=mx.uint32)) & mx.array(1, mx.uint32)).flatten(-2)
    each = stream.reshape(*words.shape[:-1], -1, bits)
    return (each << mx.arange(bits, dtype=mx.uint32)).sum(axis=-1).astype(mx.uint32)


def pack_bits(values: mx.array, bits: int) -> mx.array:
    """uint32 values [..., n] -> words [..., n * bits / 32], as unpack_bits reads them."""
    if WORD % bits == 0:
        each = values.reshape(*values.shape[:-1], -1, WORD // bits) << mx.arange(0, WORD, bits, dtype=mx.uint32)
        return each.sum(axis=-1).astype(mx.uint32)
    stream = (values[..., None] >> mx.arange(bits, dtype=mx.uint32)) & mx.array(1, mx.uint32)
    each = stream.reshape(*values.shape[:-1], -1, WORD) << mx.arange(WORD, dtype=mx.uint32)
    return each.sum(axis=-1).astype(mx.uint32)


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
