"""Writes a vocabulary of GGUF metadata as tokenizer.json and tokenizer_config.json, for folders and other readers.

A SentencePiece vocabulary has scores where tokenizer.json has ranked merges: every way to split a token into two others
becomes a merge, in the order of the tokens' scores.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .decoders import BYTE_ALPHABET
from .gguf_metadata import USER_DEFINED, TokenizerMetadata
from .gguf_vocab import (
    READERS,
    SPECIAL_TYPES,
    UNSTRIPPED,
    build_bpe,
    is_phi3,
    read_metadata,
    set_char_splits,
    set_pretokenizer,
)
from .pretokenizers import find_pretokenizer
from .spm import SPACE
from .tokenizer import Tokenizer
from .vocabulary import Vocabulary, rust_call

PROBES = (
    "It's 3,141 — naïve  <s>日本\n\n  def f(x):\treturn 'ok'",
    "   leading and trailing   ",
    "\U0001f468‍\U0001f469‍\U0001f467 \x00\x7f aaaaaaaaaaaaaaaa ---------- ÀÈ̀ß ▁▁x",
    "user: Write a function!\nassistant: for (int i = 0; i < 10; ++i) { sum += a[i]; }\n",
)
FILES = ("tokenizer.json", "tokenizer_config.json")


def write_tokenizer(folder: Path, metadata: Mapping[str, Any]) -> bool:
    """Write both files; False, and nothing written, where they would encode a text differently."""
    meta = TokenizerMetadata(metadata)
    if meta.text("model") not in READERS:
        return False
    vocabulary = read_metadata(metadata)
    backend = WRITERS[str(meta.text("model"))](meta)
    add_ends(backend, vocabulary)
    rust_call("tokenizer.json", lambda: backend.save(str(folder / FILES[0])))
    (folder / FILES[1]).write_text(json.dumps(make_config(vocabulary), ensure_ascii=False, indent=1), encoding="utf-8")
    if encodes_alike(Tokenizer(vocabulary), Tokenizer.from_folder(folder), vocabulary):
        return True
    for name in FILES:
        (folder / name).unlink()
    return False


def encodes_alike(ours: Tokenizer, theirs: Tokenizer, vocabulary: Vocabulary) -> bool:
    special = [vocabulary.names[name] for name in sorted(vocabulary.names)]
    for text in (*PROBES, " hello ".join(["", *special, ""]), "".join(special) + "x"):
        tokens = ours.encode(text)
        if tokens != theirs.encode(text) or ours.decode(tokens) != theirs.decode(tokens):
            return False
    return ours.bos_id == theirs.bos_id


def make_config(vocabulary: Vocabulary) -> dict[str, Any]:
    templates = dict(vocabulary.templates)
    one = set(templates) == {"default"}
    rows = [{"name": name, "template": text} for name, text in templates.items()]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **({"chat_template": templates["default"] if one else rows} if templates else {}),
        **vocabulary.names,
    }


def add_ends(backend, vocabulary: Vocabulary) -> None:
    """Let the post-processor add BOS and EOS where the vocabulary does."""
    from tokenizers import processors

    around, pieces = vocabulary.encode("", True), backend.id_to_token
    bos, eos = (vocabulary.names.get(f"{name}_token") for name in ("bos", "eos"))
    before = [bos] if bos is not None and around and pieces(around[0]) == bos else []
    after = [eos] if eos is not None and len(around) > len(before) else []
    if not around:
        return
    used = [(text, backend.token_to_id(text)) for text in dict.fromkeys(before + after)]
    backend.post_processor = processors.TemplateProcessing(single=[*before, "$A", *after], special_tokens=used)


def make_byte_bpe(meta: TokenizerMetadata):
    from tokenizers import decoders

    ids, pre = meta.tokens(), find_pretokenizer(str(meta.text("pre")))
    backend = build_bpe(meta, ids, meta.types(len(ids)), {"ignore_merges": pre.ignore_merges})
    set_pretokenizer(backend, pre)
    steps = [decoders.Replace(text, spelt) for text, spelt in spell_lone_letters(ids, meta.types(len(ids)))]
    backend.decoder = decoders.Sequence([*steps, decoders.ByteLevel()]) if steps else decoders.ByteLevel()
    return backend


def spell_lone_letters(ids: Mapping[str, int], types: Sequence[int]) -> list[tuple[str, str]]:
    """Added tokens such as À, which the byte-level decoder would take for the byte 0xC0: what it reads as À.

    Only letters of bytes that UTF-8 never has: no other token contains them."""
    letters = {byte: letter for letter, byte in BYTE_ALPHABET.items()}
    never = {letters[byte] for byte in (0xC0, 0xC1, *range(0xF5, 0x100))}
    lone = [text for text, kind in zip(ids, types) if kind in SPECIAL_TYPES and text in never]
    return [(text, "".join(letters[byte] for byte in text.encode())) for text in lone]


def make_char_bpe(meta: TokenizerMetadata):
    ids = meta.tokens()
    backend = build_bpe(meta, ids, meta.types(len(ids)), {"byte_fallback": True})
    set_char_splits(backend)
    backend.decoder = space_decoder(prefix=False)
    return backend


def make_spm(meta: TokenizerMetadata):
    from tokenizers import AddedToken, Tokenizer, models, normalizers

    ids, prefix = meta.tokens(), meta.flag("add_space_prefix", True)
    types, strips = meta.types(len(ids)), is_phi3(meta.values.get("general.name"))
    merges = rank_merges(ids, meta.scores(len(ids)))
    unknown = next((t for t, kind in zip(ids, types) if kind == SPECIAL_TYPES[0]), None)
    model = rust_call("the vocabulary", lambda: models.BPE(ids, merges, unk_token=unknown, byte_fallback=True))
    backend = Tokenizer(model)
    added = [
        AddedToken(t, special=kind != USER_DEFINED, normalized=False, rstrip=strips and t not in UNSTRIPPED)
        for t, kind in zip(ids, types)
        if kind in SPECIAL_TYPES
    ]
    rust_call("the special tokens", lambda: backend.add_tokens(added))
    spaces = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
    backend.decoder = space_decoder(prefix)
    return backend


def rank_merges(ids: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges that scores stand for, best first."""
    ranked: list[tuple[float, int, str, str]] = []
    for text, token in ids.items():
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in ids and right in ids:
                ranked.append((-scores[token], token, left, right))
    ranked.sort(key=lambda row: row[:2])
    return [(left, right) for _, _, left, right in ranked]


def space_decoder(prefix: bool):
    from tokenizers import decoders

    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if prefix else [])])


WRITERS = {"gpt2": make_byte_bpe, "llama": make_spm, "gemma4": make_char_bpe}
