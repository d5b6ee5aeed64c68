"""Vocabularies out of GGUF metadata: byte-level BPE ("gpt2"), raw BPE ("gemma4") and SentencePiece ("llama").

What llama.cpp does with the same metadata is the truth here.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import BadRequest, BadTokenizer
from .bytelevel import bytes_without, piece_bytes
from .decoding import Stage, Strip, Utf8
from .fragments import Fragments, Mark
from .metadata import BYTE, CONTROL, PREFIX, UNKNOWN, USER_DEFINED, Metadata
from .pretokenizers import Scheme, scheme
from .rust import rust_call
from .spm import SPACE, ScoredMerges
from .vocabulary import Vocabulary

# Tokens that end a turn under every model that has them as control tokens; files often name only one of theirs.
TURN_ENDS = ["<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>"]
TURN_ENDS += ["<EOT>", "_<EOT>", "[EOT]", "<｜end▁of▁sentence｜>", "<end_of_utterance>", "<turn|>", "<|return|>"]
NAMES = {"unknown": "unk", "padding": "pad", "seperator": "sep", "cls": "cls", "mask": "mask"}  # the format's spelling
WHOLE = (UNKNOWN, CONTROL, USER_DEFINED)  # kinds that are cut out of a text before anything else
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def read_metadata(values: Mapping[str, Any]) -> Vocabulary:
    told = Metadata(values)
    model = told.text("model")
    if model is None:
        raise BadTokenizer("the GGUF metadata has no tokenizer.ggml.model; give a model with a tokenizer")
    if model not in READERS:
        raise BadTokenizer(f"tokenizer.ggml.model is {model!r}, which mlxrt cannot use; it can: {', '.join(READERS)}")
    ids = told.tokens()
    return READERS[model](told, ids, told.types(len(ids)))


def read_bpe(told: Metadata, ids: dict[str, int], types: list[int]) -> Vocabulary:
    """GPT-2's: every byte is a printable character, words are cut by regular expressions, merges have ranks."""
    name = told.text("pre")
    if name is None:
        raise BadTokenizer("the GGUF has no tokenizer.ggml.pre, so how it cuts words is unknown; convert it again")
    cut = scheme(name)
    backend = bpe(told, ids, types, {"ignore_merges": cut.whole_words})
    split_words(backend, cut)
    pieces = [piece_bytes(t, raw=k in WHOLE) for t, k in zip(ids, types)]
    lost = bytes_without(ids)

    def encode(text: str) -> list[int]:
        if not lost.isdisjoint(data := text.encode()):
            byte = next(b for b in data if b in lost)
            raise BadRequest(f"this vocabulary has no token for byte 0x{byte:02X} of the text; remove the character")
        return rust_call("the vocabulary", lambda: backend.encode(text)).ids

    return assemble(told, ids, types, encode, pieces, (cut.bos, None, None), lambda: [Utf8()])


def read_raw_bpe(told: Metadata, ids: dict[str, int], types: list[int]) -> Vocabulary:
    """Gemma 4's: merges have ranks, but over characters; spaces are ▁ and unknown characters are bytes."""
    from tokenizers import Regex, normalizers, pre_tokenizers

    byte_ids(ids)
    backend = bpe(told, ids, types, {"byte_fallback": True})
    backend.normalizer = normalizers.Replace(" ", SPACE)
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), "isolated")
    pieces = [spaced(t, k) for t, k in zip(ids, types)]
    encode = lambda text: rust_call("the vocabulary", lambda: backend.encode(text)).ids  # noqa: E731
    return assemble(told, ids, types, encode, pieces, (True, None, None), lambda: [Utf8()])


def read_spm(told: Metadata, ids: dict[str, int], types: list[int]) -> Vocabulary:
    """SentencePiece's: scores instead of merges."""
    prefix = told.flag("add_space_prefix", True)
    merges = ScoredMerges(ids, told.scores(len(ids)), byte_ids(ids))
    strips = phi3(told.values.get("general.name"))
    special = [(t, i) for (t, i), k in zip(ids.items(), types) if k in WHOLE]
    fragments = Fragments(Mark(t, i, rstrip=strips and t not in UNSTRIPPED) for t, i in special)

    def encode(text: str) -> list[int]:
        out: list[int] = []
        for part in fragments.cut(text):
            # every stretch of text after a special token starts like a text of its own
            out += [part] if isinstance(part, int) else merges.encode(SPACE * prefix + part.replace(" ", SPACE))
        return out

    pieces = [spaced(t, k) for t, k in zip(ids, types)]
    stages: Callable[[], list[Stage]] = lambda: [Utf8(), Strip(" ", 1)] if prefix else [Utf8()]  # noqa: E731
    return assemble(told, ids, types, encode, pieces, (True, 1, 2), stages)


READERS = {"gpt2": read_bpe, "llama": read_spm, "gemma4": read_raw_bpe}


def phi3(model: object) -> bool:
    """Phi-3's special tokens swallow the white space after them; its files do not say so."""
    return isinstance(model, str) and re.search("phi-?3", model.lower()) is not None


UNSTRIPPED = ("<unk>", "<s>", "<|endoftext|>")


def spaced(text: str, kind: int) -> bytes:
    """A SentencePiece token as bytes."""
    if kind == BYTE and (found := BYTE_TOKEN.fullmatch(text)):
        return bytes([int(found[1], 16)])
    return (text if kind in (UNKNOWN, CONTROL) else text.replace(SPACE, " ")).encode()


def byte_ids(ids: Mapping[str, int]) -> list[int]:
    """The ids of the 256 bytes, without which some text could not be written."""
    found = [ids.get(f"<0x{b:02X}>", ids.get(chr(b)) if b < 128 else None) for b in range(256)]
    if None in found:
        raise BadTokenizer(f"the vocabulary has no token for byte <0x{found.index(None):02X}>")
    return found  # type: ignore[return-value]


def bpe(told: Metadata, ids: dict[str, int], types: list[int], options: dict):
    """A ranked-merges tokenizer with its special tokens, words still uncut."""
    from tokenizers import AddedToken, Tokenizer, models

    merges = told.merges()
    backend = rust_call("tokenizer.ggml.merges", lambda: Tokenizer(models.BPE(vocab=ids, merges=merges, **options)))
    rows = [AddedToken(t, special=k != USER_DEFINED, normalized=False) for t, k in zip(ids, types) if k in WHOLE]
    rust_call("the special tokens", lambda: backend.add_tokens(rows))
    return backend


def split_words(backend, cut: Scheme) -> None:
    from tokenizers import Regex, pre_tokenizers

    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in cut.splits]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(False, use_regex=False)])


def assemble(told: Metadata, ids, types, encode, pieces, defaults, stages) -> Vocabulary:
    """Add what all kinds share: BOS and EOS around a text, the ends, the names, the templates."""
    size, texts = len(ids), list(ids)
    add_bos, default_bos, default_eos = defaults
    bos, eos = told.token("bos", size, default_bos), told.token("eos", size, default_eos)
    before = around(told, "bos", told.flag("add_bos_token", add_bos), bos)
    after = around(told, "eos", told.flag("add_eos_token", False), eos)
    ends = {i for i in (eos, told.token("eot", size), told.token("eom", size)) if i is not None}
    ends |= {ids[t] for t in TURN_ENDS if t in ids and types[ids[t]] == CONTROL}
    named = {"bos_token": bos, "eos_token": eos}
    named |= {f"{name}_token": told.token(key, size) for key, name in NAMES.items()}
    return Vocabulary(
        size=size,
        encode=lambda text, special: before * special + encode(text) + after * special,
        piece=pieces.__getitem__,
        hidden=frozenset(i for i, k in enumerate(types) if k in (UNKNOWN, CONTROL)),
        stages=stages,
        bos=bos,
        ends=frozenset(ends),
        names={name: texts[i] for name, i in named.items() if i is not None},
        templates=told.templates(),
        digest=fingerprint(told),
    )


def around(told: Metadata, name: str, wanted: bool, token: int | None) -> list[int]:
    if wanted and token is None:
        raise BadTokenizer(f"the GGUF asks to add {name} to every text and names no tokenizer.ggml.{name}_token_id")
    return [token] if wanted and token is not None else []


def fingerprint(told: Metadata) -> str:
    lists = [PREFIX + key for key in ("tokens", "scores", "token_type", "merges")]
    kept = {k: told.values[k] for k in lists if k in told.values}
    kept |= {k: v for k, v in told.values.items() if str(k).startswith(PREFIX) and isinstance(v, (str, int, float))}
    stripping = phi3(told.values.get("general.name"))
    return hashlib.sha256(json.dumps([kept, stripping], sort_keys=True).encode()).hexdigest()
