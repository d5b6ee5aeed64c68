"""Whole numbers of a few bits in 32-bit words, both ways there are: as one stream of bits, or never across a word.

Knows bits and words. Refuses to know what the numbers mean and who packed them.
"""

import mlx.core as mx

WORD = 32


def unpack_fields(words: mx.array, bits: int) -> mx.array:
    """uint32 [..., n] -> the numbers in it, [..., n * 32 / bits]: a stream of bits, the lowest first."""
    if WORD % bits == 0:
        each = (words[..., None] >> mx.arange(0, WORD, bits, dtype=mx.uint32)) & mx.array((1 << bits) - 1, mx.uint32)
        return each.flatten(-2)
    stream = ((words[..., None] >> mx.arange(WORD, dtype=mx.uint32)) & mx.array(1, mx.uint32)).flatten(-2)
    each = stream.reshape(*words.shape[:-1], -1, bits)
    return (each << mx.arange(bits, dtype=mx.uint32)).sum(axis=-1).astype(mx.uint32)


def pack(q: mx.array, bits: int) -> mx.array:
    """uint32 numbers [..., n] -> words [..., n * bits / 32], as unpack_fields reads them."""
    if WORD % bits == 0:
        each = q.reshape(*q.shape[:-1], -1, WORD // bits) << mx.arange(0, WORD, bits, dtype=mx.uint32)
        return each.sum(axis=-1).astype(mx.uint32)
    stream = (q[..., None] >> mx.arange(bits, dtype=mx.uint32)) & mx.array(1, mx.uint32)
    each = stream.reshape(*q.shape[:-1], -1, WORD) << mx.arange(WORD, dtype=mx.uint32)
    return each.sum(axis=-1).astype(mx.uint32)


def words_for(count: int, bits: int) -> int:
    """Words that hold `count` numbers, none across a word."""
    return -(-count // (WORD // bits))


def unpack_whole(words: mx.array, bits: int, count: int) -> mx.array:
    """uint32 [..., n] -> its first `count` numbers: 32 // bits of them in a word, the lowest first."""
    each = (words[..., None] >> places(bits)) & mx.array((1 << bits) - 1, mx.uint32)
    return each.flatten(-2)[..., :count]


def pack_whole(q: mx.array, bits: int) -> mx.array:
    """Numbers [..., n] -> words, as unpack_whole reads them; the last word is filled up with zeros."""
    each = WORD // bits
    spare = words_for(q.shape[-1], bits) * each - q.shape[-1]
    q = mx.pad(q.astype(mx.uint32), [(0, 0)] * (q.ndim - 1) + [(0, spare)])
    return (q.reshape(*q.shape[:-1], -1, each) << places(bits)).sum(axis=-1).astype(mx.uint32)


def places(bits: int) -> mx.array:
    """Where the numbers of a word begin."""
    return mx.arange(WORD // bits, dtype=mx.uint32) * bits
