"""The decoders that tokenizer.json files name, as stages of a stream. An unknown one is refused, never approximated."""

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import BadTokenizer
from .bytelevel import piece_bytes
from .decoding import ByteRuns, FirstToken, LastToken, PerToken, Replace, Stage, Strip, Utf8

Recipe = list[Callable[[], Stage]]

# English punctuation that word-level vocabularies glue back, in the order it is replaced.
GLUED = ((" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"))
GLUED_ENDS = ((" 's", "'s"), (" 've", "'ve"), (" 're", "'re"))


def recipe(spec: Mapping[str, Any] | None) -> Recipe:
    """Makers of the stages for a tokenizer.json's `decoder`; without one, tokens are joined by spaces."""
    if spec is None:
        return [lambda: FirstToken(str, lambda t: " " + t)]
    steps, fused, out = flat(spec), False, []
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


def flat(spec: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if spec["type"] != "Sequence":
        return [spec]
    return [step for inner in spec["decoders"] for step in flat(inner)]


def clean_up() -> Recipe:
    """What `clean_up_tokenization_spaces` asks for, over the whole text."""
    return [lambda old=old, new=new: Replace(old, new) for old, new in GLUED + GLUED_ENDS]  # type: ignore[misc]


def byte_level(step: Mapping[str, Any]):
    known: dict[str, bytes] = {}

    def bytes_of(piece: str) -> bytes:
        if piece not in known:
            known[piece] = piece_bytes(piece)
        return known[piece]

    return lambda: Utf8(bytes_of)


def word_piece(step: Mapping[str, Any]):
    prefix, clean = step["prefix"], glue if step["cleanup"] else str

    def later(piece: str) -> str:
        return clean(piece[len(prefix) :] if piece.startswith(prefix) else " " + piece)

    return lambda: FirstToken(clean, later)


def glue(text: str) -> str:
    for old, new in (*GLUED, (" do not", " don't"), *GLUED_ENDS):
        text = text.replace(old, new)
    return text


def metaspace(step: Mapping[str, Any]):
    mark, prepended = step["replacement"], step["prepend_scheme"] != "never"
    return lambda: FirstToken(
        lambda t: t.replace(mark, "" if prepended else " "),
        lambda t: t.replace(mark, " "),
    )


def word_ends(step: Mapping[str, Any]):
    suffix = step["suffix"]
    return lambda: LastToken(lambda t: t.replace(suffix, " "), lambda t: t.replace(suffix, ""))


def plain_pattern(step: Mapping[str, Any]) -> tuple[str, str]:
    pattern = step["pattern"].get("String")
    if not pattern:
        raise BadTokenizer(f"decoder Replace with pattern {step['pattern']} is not supported; only a plain text is")
    return pattern, step["content"]


def replace(step: Mapping[str, Any]):
    old, new = plain_pattern(step)
    return lambda: PerToken(lambda t: t.replace(old, new))


def replace_all(step: Mapping[str, Any]):
    old, new = plain_pattern(step)
    return lambda: Replace(old, new)


def leading(step: Mapping[str, Any]) -> tuple[str, int]:
    if step["stop"]:
        raise BadTokenizer("decoder Strip at the end of a text is not supported; only at its start")
    return step["content"], step["start"]


def strip(step: Mapping[str, Any]):
    mark, count = leading(step)
    return lambda: PerToken(lambda t: "".join(Strip(mark, count).push([t])))


def strip_all(step: Mapping[str, Any]):
    mark, count = leading(step)
    return lambda: Strip(mark, count)


BEFORE_FUSE: dict[str, Callable[[Mapping[str, Any]], Callable[[], Stage]]] = {
    "ByteLevel": byte_level,
    "WordPiece": word_piece,
    "Metaspace": metaspace,
    "BPEDecoder": word_ends,
    "ByteFallback": lambda step: ByteRuns,
    "Replace": replace,
    "Strip": strip,
}
AFTER_FUSE: dict[str, Callable[[Mapping[str, Any]], Callable[[], Stage]]] = {"Replace": replace_all, "Strip": strip_all}
