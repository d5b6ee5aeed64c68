"""GPT-2's alphabet: a printable character for each of the 256 bytes. Knows nothing else."""

from collections.abc import Container
from functools import cache


@cache
def alphabet() -> dict[str, int]:
    """Bytes that print stand for themselves; the others take the characters from U+0100 on, in order."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in set(plain)]
    return {chr(b): b for b in plain} | {chr(0x100 + i): b for i, b in enumerate(hidden)}


def bytes_without(ids: Container[str]) -> frozenset[int]:
    """The bytes of UTF-8 text that have no token: some vocabularies never met the rarest."""
    found = (byte for letter, byte in LETTERS.items() if letter not in ids)
    return frozenset(b for b in found if b not in (0xC0, 0xC1) and b < 0xF5)


def piece_bytes(text: str, raw: bool = False) -> bytes:
    """The bytes a token stands for; a token that is not spelled in the alphabet stands for its own text."""
    if raw:
        return text.encode()
    try:
        return bytes([LETTERS[c] for c in text])
    except KeyError:
        return text.encode()


LETTERS = alphabet()
