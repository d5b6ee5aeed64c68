"""SentencePiece: tokenizer.model through its own library, and the score-based BPE that GGUF files carry.

Hugging Face's files beside a tokenizer.model say which tokens are special and whether text after one gets a leading
space; special tokens are split off before the library sees the text.
"""

import hashlib
import heapq
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

from ..errors import BadTokenizer
from .decoders import build_stages
from .tokenizer_config import Settings
from .vocabulary import SpecialToken, SpecialTokenSplitter, Vocabulary

SPACE = "\u2581"
USER_DEFINED = 4  # a piece's type
# `normalizer_spec { add_dummy_prefix: false }` in a model's own format, where a message that comes again is merged
# with the first. The library's method for it is gone since 0.2.3.
NO_PREFIX = b"\x1a\x02\x18\x00"


def read_model(data: bytes, settings: Settings) -> Vocabulary:
    start = load(data + NO_PREFIX * (settings.prefix_space is False))
    later = load(data + NO_PREFIX * (not settings.legacy))
    prefixed = start.normalize("a").startswith(SPACE)
    pieces = read_pieces(start)
    control = {p: i for i, p in enumerate(pieces) if start.is_control(i) or start.is_unknown(i)}
    tokens = {text: SpecialToken(text, i) for text, i in control.items()}
    special_ids = set(control.values())
    for text, flags in configured_tokens(settings).items():
        token = assign_id(text, flags, pieces)
        tokens[text] = SpecialToken(text, token, flags.get("lstrip", False), flags.get("rstrip", False))
        special_ids |= {token} if flags["special"] else set()

    def make_encoder(forms: Mapping[str, str]):
        splitter = SpecialTokenSplitter(replace(t, text=forms.get(t.text, t.text)) for t in tokens.values())
        inside = re.compile("|".join(rf"(?<={re.escape(t[0])})(?={re.escape(t[1:])})" for t in forms) or "(?!)")

        def encode(text: str) -> list[int]:
            out: list[int] = []
            for part in splitter.split(text):
                if isinstance(part, int):
                    out.append(part)
                    continue
                for piece in inside.split(part):  # the library itself knows the user-defined ones
                    out += (later if out else start).encode(piece)
            return out

        return encode

    encode = make_encoder({})
    found = assemble(settings, encode, pieces, frozenset(special_ids), prefixed, hashlib.sha256(data).hexdigest())
    return replace(found, added={text: token.id for text, token in tokens.items()}, rename=make_encoder)


def load(data: bytes):
    import sentencepiece

    try:
        if not data.removesuffix(NO_PREFIX):  # the library takes that for a model yet to be loaded
            raise ValueError("the file is empty")
        return sentencepiece.SentencePieceProcessor(model_proto=data)
    except (RuntimeError, OSError, ValueError, TypeError) as e:
        raise BadTokenizer(f"tokenizer.model is not a SentencePiece model: {' '.join(str(e).split())[:200]}") from None


def read_pieces(loaded) -> list[str]:
    try:
        return [loaded.id_to_piece(i) for i in range(loaded.get_piece_size())]
    except UnicodeDecodeError as e:
        raise BadTokenizer(f"tokenizer.model holds a piece that is not valid text: {e}") from None


def read_scores(data: bytes) -> tuple[dict[str, float], list[str]]:
    """The scores of a model's pieces, by which its BPE merges, and the pieces that are user-defined, which the library
    knows and does not tell."""
    loaded = load(data)
    pieces = read_pieces(loaded)
    kinds = [dict(read_fields(value)).get(3) for number, value in read_fields(data) if number == 1]
    defined = [piece for piece, kind in zip(pieces, kinds) if kind == USER_DEFINED]
    return {piece: loaded.get_score(i) for i, piece in enumerate(pieces)}, defined


def read_fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a protobuf message by number: bytes, or an integer."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            value, at, shift = value | (byte & 127) << shift, at + 1, shift + 7
            if byte < 128:
                return value

    while at < len(data):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
            continue
        size = varint() if key & 7 == 2 else {1: 8, 5: 4}[key & 7]
        at += size
        yield key >> 3, data[at - size : at]


def configured_tokens(settings: Settings) -> dict[str, dict[str, Any]]:
    """The tokens that tokenizer_config.json adds or names, with their flags."""
    found = {a.text: {"id": a.id, "special": a.special, "lstrip": a.lstrip, "rstrip": a.rstrip} for a in settings.added}
    for text in (*settings.names.values(), *settings.extra):
        found.setdefault(text, {"id": None})["special"] = True
    return found


def assign_id(text: str, flags: dict[str, Any], pieces: list[str]) -> int:
    """The id of a token; one that the model does not have is appended, or put at the id it is given."""
    token = flags["id"]
    if token is None:
        token = pieces.index(text) if text in pieces else len(pieces)
    if token > len(pieces):
        raise BadTokenizer(f"the added token {text!r} has id {token}; the next free one is {len(pieces)}")
    pieces[token : token + 1] = [text]
    return token


def assemble(settings: Settings, encode, pieces: list[str], special_ids: frozenset[int], prefixed: bool, digest: str):
    ids = {text: i for i, text in enumerate(pieces)}
    bos, eos = (ids.get(settings.names.get(role, "")) for role in ("bos_token", "eos_token"))
    before = [bos] if settings.add_bos and bos is not None else []
    after = [eos] if settings.add_eos and eos is not None else []
    spec: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}]
    spec += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    spec += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefixed else []
    stages = build_stages({"type": "Sequence", "decoders": spec})
    parts = [digest, pieces, sorted(special_ids), before, after, prefixed, settings.legacy]
    return Vocabulary(
        size=len(pieces),
        encode=lambda text, special: before * special + encode(text) + after * special,
        piece=pieces.__getitem__,
        special_ids=special_ids,
        stages=lambda: [make() for make in stages],
        bos=bos,
        eos_ids=frozenset() if eos is None else frozenset({eos}),
        names=settings.names,
        templates=settings.templates,
        digest=hashlib.sha256(json.dumps(parts).encode("utf-8", "surrogatepass")).hexdigest(),
    )


class ScoredMerges:
    """BPE by scores instead of ranked merges: the pair with the best score merges first, equal scores from the left.

    Spaces are already ▁. A character without a token becomes its bytes.
    """

    def __init__(self, ids: Mapping[str, int], scores: Sequence[float], byte_ids: Sequence[int]):
        self.ids, self.scores, self.byte_ids = ids, scores, byte_ids
        # Where no token has a character before a space, no merge crosses that border: the text is split there, and
        # the parts, which repeat, are cached.
        inside = (t for t in ids if SPACE in t[1:])
        before = {c for t in inside for c, d in pairwise(t) if d == SPACE and c != SPACE}
        glued = "".join(map(re.escape, sorted(before)))
        self.split = re.compile(rf"(?<=[^{SPACE}{glued}])(?={SPACE})")
        self.merge = lru_cache(maxsize=1 << 15)(self._merge)

    def encode(self, text: str) -> list[int]:
        return [i for word in self.split.split(text) for i in self.merge(word)] if text else []

    def _merge(self, word: str) -> tuple[int, ...]:
        """Merge neighbours, best score first, until no pair is a token."""
        parts: list[str] = list(word)
        left, right = list(range(-1, len(parts) - 1)), [*range(1, len(parts)), -1]
        pairs: list[tuple[float, int, int, str]] = []

        def offer(a: int, b: int) -> None:
            if a >= 0 and b >= 0 and (token := self.ids.get(parts[a] + parts[b])) is not None:
                heapq.heappush(pairs, (-self.scores[token], a, b, parts[a] + parts[b]))

        for b in range(1, len(parts)):
            offer(b - 1, b)
        while pairs:
            _, a, b, merged = heapq.heappop(pairs)
            if not parts[a] or not parts[b] or len(parts[a]) + len(parts[b]) != len(merged):
                continue
            parts[a], parts[b] = merged, ""
            right[a] = right[b]
            if right[b] >= 0:
                left[right[b]] = a
            offer(left[a], a)
            offer(a, right[a])
        return tuple(i for part in parts if part for i in self._ids(part))

    def _ids(self, part: str) -> Sequence[int]:
        token = self.ids.get(part)
        return [self.byte_ids[b] for b in part.encode()] if token is None else [token]
