"""Decoders of tokenizer.json as streaming stages, and GPT-2's byte-level alphabet. Unknown decoders are refused."""

from collections.abc import Callable, Container, Mapping
from functools import cache, partial
from typing import Any

from ..errors import BadTokenizer
from .detokenizer import ByteFallback, FirstToken, LastToken, PerToken, Replace, Stage, Strip, Utf8

StageFactory = Callable[[], Stage]

# `clean_up_tokenization_spaces`, in the order of the replacements.
CLEAN_UP = ((" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"))
CLEAN_UP_SUFFIXES = ((" 's", "'s"), (" 've", "'ve"), (" 're", "'re"))


def build_byte_alphabet() -> dict[str, int]:
    """Printable bytes stand for themselves; the others take the characters from U+0100 on, in order."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in set(plain)]
    return {chr(b): b for b in plain} | {chr(0x100 + i): b for i, b in enumerate(hidden)}


BYTE_ALPHABET = build_byte_alphabet()


def missing_bytes(ids: Container[str]) -> frozenset[int]:
    """The bytes of UTF-8 that have no token: some vocabularies lack the rarest."""
    missing = (byte for letter, byte in BYTE_ALPHABET.items() if letter not in ids)
    return frozenset(b for b in missing if b not in (0xC0, 0xC1) and b < 0xF5)


def piece_bytes(piece: str, raw: bool = False) -> bytes:
    """The bytes of a token; a piece outside the alphabet stands for its own text."""
    if raw:
        return piece.encode()
    try:
        return bytes([BYTE_ALPHABET[c] for c in piece])
    except KeyError:
        return piece.encode()


def build_stages(spec: Mapping[str, Any] | None) -> list[StageFactory]:
    """Stage factories for a tokenizer.json's `decoder`; without one, tokens are joined by spaces."""
    if spec is None:
        return [lambda: FirstToken(str, lambda t: " " + t)]
    steps, fused, out = flatten(spec), False, []
    for step in steps:
        kind = step["type"]
        if kind == "Fuse":
            fused = True
            continue
        make = (AFTER_FUSE if fused else BEFORE_FUSE).get(kind)
        if make is None:
            known = ", ".join(sorted({"Fuse", "Sequence", *(AFTER_FUSE if fused else BEFORE_FUSE)}))
            raise BadTokenizer(f"decoder {kind}{' after Fuse' * fused} is not supported; supported: {known}")
        out.append(make(step))
        fused = fused or kind == "ByteLevel"
    return out


def flatten(spec: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if spec["type"] != "Sequence":
        return [spec]
    return [step for inner in spec["decoders"] for step in flatten(inner)]


def clean_up_stages() -> list[StageFactory]:
    """`clean_up_tokenization_spaces`, over the full text."""
    return [lambda old=old, new=new: Replace(old, new) for old, new in CLEAN_UP + CLEAN_UP_SUFFIXES]  # type: ignore[misc]


def byte_level(step: Mapping[str, Any]) -> StageFactory:
    return partial(Utf8, cache(piece_bytes))


def word_piece(step: Mapping[str, Any]) -> StageFactory:
    prefix, clean = step["prefix"], clean_up_piece if step["cleanup"] else str

    def later(piece: str) -> str:
        return clean(piece[len(prefix) :] if piece.startswith(prefix) else " " + piece)

    return lambda: FirstToken(clean, later)


def clean_up_piece(text: str) -> str:
    for old, new in (*CLEAN_UP, (" do not", " don't"), *CLEAN_UP_SUFFIXES):
        text = text.replace(old, new)
    return text


def metaspace(step: Mapping[str, Any]) -> StageFactory:
    marker, prepended = step["replacement"], step["prepend_scheme"] != "never"
    start = "" if prepended else " "
    return lambda: FirstToken(lambda t: t.replace(marker, start), lambda t: t.replace(marker, " "))


def bpe_suffix(step: Mapping[str, Any]) -> StageFactory:
    suffix = step["suffix"]
    return lambda: LastToken(lambda t: t.replace(suffix, " "), lambda t: t.replace(suffix, ""))


def plain_pattern(step: Mapping[str, Any]) -> tuple[str, str]:
    pattern = step["pattern"].get("String")
    if not pattern:
        raise BadTokenizer(f"decoder Replace with pattern {step['pattern']} is not supported; only a plain string is")
    return pattern, step["content"]


def replace_in_token(step: Mapping[str, Any]) -> StageFactory:
    old, new = plain_pattern(step)
    return lambda: PerToken(lambda t: t.replace(old, new))


def strip_arguments(step: Mapping[str, Any]) -> tuple[str, int]:
    if step["stop"]:
        raise BadTokenizer("decoder Strip at the end of a text is not supported; only at its start")
    return step["content"], step["start"]


def strip_token(step: Mapping[str, Any]) -> StageFactory:
    char, count = strip_arguments(step)
    return lambda: PerToken(lambda t: "".join(Strip(char, count).push([t])))


BEFORE_FUSE: dict[str, Callable[[Mapping[str, Any]], StageFactory]] = {
    "ByteLevel": byte_level,
    "WordPiece": word_piece,
    "Metaspace": metaspace,
    "BPEDecoder": bpe_suffix,
    "ByteFallback": lambda step: ByteFallback,
    "Replace": replace_in_token,
    "Strip": strip_token,
}
AFTER_FUSE: dict[str, Callable[[Mapping[str, Any]], StageFactory]] = {
    "Replace": lambda step: partial(Replace, *plain_pattern(step)),
    "Strip": lambda step: partial(Strip, *strip_arguments(step)),
}
