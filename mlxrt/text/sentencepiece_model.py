"""Vocabularies out of SentencePiece's tokenizer.model, run by its own library; special tokens are cut out before.

The files around it (Hugging Face's) say which tokens are special and whether text after one gets a leading space.
"""

import hashlib
import json
from typing import Any

from ..errors import BadTokenizer
from .decoders import recipe
from .fragments import Fragments, Mark
from .settings import Settings
from .vocabulary import Vocabulary

SPACE = "\u2581"


def read_model(data: bytes, settings: Settings) -> Vocabulary:
    start, later = load(data), load(data)
    if settings.prefix_space is False:
        start.override_normalizer_spec(add_dummy_prefix=False)
    prefixed = start.normalize("a").startswith(SPACE)
    if not settings.legacy:
        later.override_normalizer_spec(add_dummy_prefix=False)
    pieces = texts_of(start)
    special = {p: i for i, p in enumerate(pieces) if start.is_control(i) or start.is_unknown(i)}
    marks = {text: Mark(text, i) for text, i in special.items()}
    hidden = set(special.values())
    for text, flags in wanted(settings).items():
        where = place(text, flags, pieces)
        marks[text] = Mark(text, where, flags.get("lstrip", False), flags.get("rstrip", False))
        hidden |= {where} if flags["special"] else set()
    fragments = Fragments(marks.values())

    def encode(text: str) -> list[int]:
        out: list[int] = []
        for part in fragments.cut(text):
            out += [part] if isinstance(part, int) else (later if out else start).encode(part)
        return out

    return assemble(settings, encode, pieces, frozenset(hidden), prefixed, hashlib.sha256(data).hexdigest())


def load(data: bytes):
    import sentencepiece

    try:
        if not data:  # the library takes that for a model yet to be loaded
            raise ValueError("the file is empty")
        return sentencepiece.SentencePieceProcessor(model_proto=data)
    except (RuntimeError, OSError, ValueError, TypeError) as e:
        raise BadTokenizer(f"tokenizer.model is not a SentencePiece model: {' '.join(str(e).split())[:200]}") from None


def texts_of(loaded) -> list[str]:
    try:
        return [loaded.id_to_piece(i) for i in range(loaded.get_piece_size())]
    except UnicodeDecodeError as e:
        raise BadTokenizer(f"tokenizer.model holds a piece that is no text: {e}") from None


def wanted(settings: Settings) -> dict[str, dict[str, Any]]:
    """The tokens the configuration adds or names, with what it says of them."""
    found = {a.text: {"id": a.id, "special": a.special, "lstrip": a.lstrip, "rstrip": a.rstrip} for a in settings.added}
    for text in (*settings.names.values(), *settings.extra):
        found.setdefault(text, {"id": None})["special"] = True
    return found


def place(text: str, flags: dict[str, Any], pieces: list[str]) -> int:
    """Where a token is; one that the model does not have goes behind its pieces, or into the place it is given."""
    where = flags["id"]
    if where is None:
        where = pieces.index(text) if text in pieces else len(pieces)
    if where > len(pieces):
        raise BadTokenizer(f"the added token {text!r} has id {where}; the next free one is {len(pieces)}")
    pieces[where : where + 1] = [text]
    return where


def assemble(settings: Settings, encode, pieces: list[str], hidden: frozenset[int], prefixed: bool, digest: str):
    ids = {text: i for i, text in enumerate(pieces)}
    bos, eos = (ids.get(settings.names.get(role, "")) for role in ("bos_token", "eos_token"))
    before = [bos] if settings.add_bos and bos is not None else []
    after = [eos] if settings.add_eos and eos is not None else []
    spec: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}]
    spec += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    spec += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefixed else []
    steps = recipe({"type": "Sequence", "decoders": spec})
    told = [digest, pieces, sorted(hidden), before, after, prefixed, settings.legacy]
    return Vocabulary(
        size=len(pieces),
        encode=lambda text, special: before * special + encode(text) + after * special,
        piece=pieces.__getitem__,
        hidden=hidden,
        stages=lambda: [make() for make in steps],
        bos=bos,
        ends=frozenset() if eos is None else frozenset({eos}),
        names=settings.names,
        templates=settings.templates,
        digest=hashlib.sha256(json.dumps(told).encode("utf-8", "surrogatepass")).hexdigest(),
    )
