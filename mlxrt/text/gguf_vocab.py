"""Vocabularies from GGUF metadata: byte-level BPE ("gpt2"), BPE over characters ("gemma4") and SentencePiece ("llama").

llama.cpp's behaviour on the same metadata is the reference.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import BadRequest, BadTokenizer
from .decoders import missing_bytes, piece_bytes
from .detokenizer import Stage, Strip, Utf8
from .gguf_metadata import BYTE, CONTROL, PREFIX, UNKNOWN, USER_DEFINED, TokenizerMetadata
from .pretokenizers import PreTokenizer, find_pretokenizer
from .spm import SPACE, ScoredMerges
from .vocabulary import SpecialToken, SpecialTokenSplitter, Vocabulary, rust_call

# End-of-turn tokens of known models: files often name only one of theirs.
TURN_ENDS = ["<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>"]
TURN_ENDS += ["<EOT>", "_<EOT>", "[EOT]", "<｜end▁of▁sentence｜>", "<end_of_utterance>", "<turn|>", "<|return|>"]
NAMES = {"unknown": "unk", "padding": "pad", "seperator": "sep", "cls": "cls", "mask": "mask"}  # the format's spelling
SPECIAL_TYPES = (UNKNOWN, CONTROL, USER_DEFINED)  # matched in a text before anything else
Encoder = Callable[[str], list[int]]
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def read_metadata(values: Mapping[str, Any]) -> Vocabulary:
    meta = TokenizerMetadata(values)
    model = meta.text("model")
    if model is None:
        raise BadTokenizer("the GGUF metadata has no tokenizer.ggml.model; give a model with a tokenizer")
    if model not in READERS:
        raise BadTokenizer(f"tokenizer.ggml.model is {model!r}, which mlxrt cannot use; it can: {', '.join(READERS)}")
    ids = meta.tokens()
    return READERS[model](meta, ids, meta.types(len(ids)))


def read_bpe(meta: TokenizerMetadata, ids: dict[str, int], types: list[int]) -> Vocabulary:
    """GPT-2's byte-level BPE: pre-tokenized by regular expressions, merges by rank."""
    name = meta.text("pre")
    if name is None:
        raise BadTokenizer("the GGUF has no tokenizer.ggml.pre, so its pre-tokenizer is unknown; convert it again")
    pre = find_pretokenizer(name)
    pieces = [piece_bytes(t, raw=k in SPECIAL_TYPES) for t, k in zip(ids, types)]
    missing = missing_bytes(ids)

    def make_encoder(forms: Mapping[str, str]) -> Encoder:
        backend = build_bpe(meta, rename_ids(ids, forms), types, {"ignore_merges": pre.ignore_merges})
        set_pretokenizer(backend, pre)

        def encode(text: str) -> list[int]:
            if not missing.isdisjoint(data := text.encode()):
                byte = next(b for b in data if b in missing)
                raise BadRequest(
                    f"this vocabulary has no token for byte 0x{byte:02X} of the text; remove the character"
                )
            return rust_call("the vocabulary", lambda: backend.encode(text)).ids

        return encode

    return assemble(meta, ids, types, make_encoder, pieces, (pre.add_bos, None, None), lambda: [Utf8()])


def read_char_bpe(meta: TokenizerMetadata, ids: dict[str, int], types: list[int]) -> Vocabulary:
    """Gemma 4's BPE over characters: spaces are ▁, unknown characters fall back to bytes."""
    byte_ids(ids)

    def make_encoder(forms: Mapping[str, str]) -> Encoder:
        backend = build_bpe(meta, rename_ids(ids, forms), types, {"byte_fallback": True})
        set_char_splits(backend)
        return lambda text: rust_call("the vocabulary", lambda: backend.encode(text)).ids

    pieces = [spm_piece_bytes(t, k) for t, k in zip(ids, types)]
    return assemble(meta, ids, types, make_encoder, pieces, (True, None, None), lambda: [Utf8()])


def read_spm(meta: TokenizerMetadata, ids: dict[str, int], types: list[int]) -> Vocabulary:
    """SentencePiece's BPE: scores instead of ranked merges."""
    prefix = meta.flag("add_space_prefix", True)
    scores, bytes_of = meta.scores(len(ids)), byte_ids(ids)
    strips = is_phi3(meta.values.get("general.name"))
    special = [(t, i) for (t, i), k in zip(ids.items(), types) if k in SPECIAL_TYPES]

    def make_encoder(forms: Mapping[str, str]) -> Encoder:
        splitter = SpecialTokenSplitter(
            SpecialToken(forms.get(t, t), i, rstrip=strips and t not in UNSTRIPPED) for t, i in special
        )
        merges = ScoredMerges(rename_ids(ids, forms), scores, bytes_of)

        def encode(text: str) -> list[int]:
            out: list[int] = []
            for part in splitter.split(text):
                # the text after a special token gets a space prefix too
                out += [part] if isinstance(part, int) else merges.encode(SPACE * prefix + part.replace(" ", SPACE))
            return out

        return encode

    pieces = [spm_piece_bytes(t, k) for t, k in zip(ids, types)]
    stages: Callable[[], list[Stage]] = lambda: [Utf8(), Strip(" ", 1)] if prefix else [Utf8()]  # noqa: E731
    return assemble(meta, ids, types, make_encoder, pieces, (True, 1, 2), stages)


READERS = {"gpt2": read_bpe, "llama": read_spm, "gemma4": read_char_bpe}


def is_phi3(model: object) -> bool:
    """Phi-3's special tokens swallow the white space after them; its files do not say so."""
    return isinstance(model, str) and re.search("phi-?3", model.lower()) is not None


UNSTRIPPED = ("<unk>", "<s>", "<|endoftext|>")


def spm_piece_bytes(text: str, kind: int) -> bytes:
    """The bytes of a SentencePiece token."""
    if kind == BYTE and (found := BYTE_TOKEN.fullmatch(text)):
        return bytes([int(found[1], 16)])
    return (text if kind in (UNKNOWN, CONTROL) else text.replace(SPACE, " ")).encode()


def byte_ids(ids: Mapping[str, int]) -> list[int]:
    """The ids of the 256 byte tokens."""
    found = [ids.get(f"<0x{b:02X}>", ids.get(chr(b)) if b < 128 else None) for b in range(256)]
    if None in found:
        raise BadTokenizer(f"the vocabulary has no token for byte <0x{found.index(None):02X}>")
    return found  # type: ignore[return-value]


def build_bpe(meta: TokenizerMetadata, ids: dict[str, int], types: list[int], options: dict):
    """A BPE tokenizer with its special tokens, without a pre-tokenizer."""
    from tokenizers import AddedToken, Tokenizer, models

    merges = meta.merges()
    backend = rust_call("tokenizer.ggml.merges", lambda: Tokenizer(models.BPE(vocab=ids, merges=merges, **options)))
    special = [(t, k) for t, k in zip(ids, types) if k in SPECIAL_TYPES]
    added = [AddedToken(t, special=k != USER_DEFINED, normalized=False) for t, k in special]
    rust_call("the special tokens", lambda: backend.add_tokens(added))
    return backend


def set_pretokenizer(backend, pre: PreTokenizer) -> None:
    from tokenizers import Regex, pre_tokenizers

    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.splits]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(False, use_regex=False)])


def set_char_splits(backend) -> None:
    """As Gemma 4: spaces are ▁, lines are encoded by themselves."""
    from tokenizers import Regex, normalizers, pre_tokenizers

    backend.normalizer = normalizers.Replace(" ", SPACE)
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), "isolated")


def rename_ids(ids: dict[str, int], forms: Mapping[str, str]) -> dict[str, int]:
    return {forms.get(text, text): i for text, i in ids.items()} if forms else ids


def assemble(meta: TokenizerMetadata, ids, types, make_encoder, pieces, defaults, stages) -> Vocabulary:
    """Add what all kinds share: BOS and EOS, end-of-turn tokens, names, chat templates."""
    size, pieces_by_id, encode = len(ids), list(ids), make_encoder({})
    add_bos, default_bos, default_eos = defaults
    bos, eos = meta.token("bos", size, default_bos), meta.token("eos", size, default_eos)
    before = added_token(meta, "bos", meta.flag("add_bos_token", add_bos), bos)
    after = added_token(meta, "eos", meta.flag("add_eos_token", False), eos)
    eos_ids = {i for i in (eos, meta.token("eot", size), meta.token("eom", size)) if i is not None}
    eos_ids |= {ids[t] for t in TURN_ENDS if t in ids and types[ids[t]] == CONTROL}
    named = {"bos_token": bos, "eos_token": eos}
    named |= {f"{name}_token": meta.token(key, size) for key, name in NAMES.items()}
    return Vocabulary(
        size=size,
        encode=lambda text, special: before * special + encode(text) + after * special,
        piece=pieces.__getitem__,
        special_ids=frozenset(i for i, k in enumerate(types) if k in (UNKNOWN, CONTROL)),
        stages=stages,
        bos=bos,
        eos_ids=frozenset(eos_ids),
        names={name: pieces_by_id[i] for name, i in named.items() if i is not None},
        templates=meta.templates(),
        digest=metadata_digest(meta),
        added={text: i for (text, i), kind in zip(ids.items(), types) if kind in SPECIAL_TYPES},
        rename=make_encoder,
    )


def added_token(meta: TokenizerMetadata, name: str, add: bool, token: int | None) -> list[int]:
    if add and token is None:
        raise BadTokenizer(f"the GGUF asks to add {name} to every text and names no tokenizer.ggml.{name}_token_id")
    return [token] if add and token is not None else []


def metadata_digest(meta: TokenizerMetadata) -> str:
    lists = [PREFIX + key for key in ("tokens", "scores", "token_type", "merges")]
    kept = {k: meta.values[k] for k in lists if k in meta.values}
    kept |= {k: v for k, v in meta.values.items() if str(k).startswith(PREFIX) and isinstance(v, (str, int, float))}
    strips = is_phi3(meta.values.get("general.name"))
    return hashlib.sha256(json.dumps([kept, strips], sort_keys=True).encode()).hexdigest()
