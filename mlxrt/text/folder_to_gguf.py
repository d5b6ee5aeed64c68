"""GGUF metadata of the tokenizer in a folder: gguf_vocab.py backwards, for files that llama.cpp opens too.

A pre-tokenizer is found in our table by its regular expressions: a wrong name would give wrong tokens in silence. What
was made is read again and compared with the folder's tokenizer before it is used.
"""

import json
import logging
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import BadTokenizer, quote
from .gguf_metadata import BYTE, CONTROL, NORMAL, PREFIX, UNKNOWN, UNUSED, USER_DEFINED
from .gguf_to_json import PROBES
from .gguf_vocab import BYTE_TOKEN, NAMES, TURN_ENDS
from .pretokenizers import pretokenizers
from .spm import SPACE, read_scores
from .tokenizer import Tokenizer
from .tokenizer_config import read_bytes, read_object, read_settings

log = logging.getLogger("mlxrt")

STOPS = ("eos", "eot", "eom")
NO_MERGE = -1e6  # the score of a token that no merge makes
GPT_2_SPLIT = pretokenizers()["gpt-2"].splits[0]  # what ByteLevel does unless it is switched off
Values = dict[str, Any]


def tokenizer_metadata(folder: Path, rows: int, stops: Sequence[int] = (), *, chars: bool = False) -> Values:
    """The tokenizer.* keys for a model with `rows` embeddings, which ends answers with `stops`.

    `chars`: BPE over characters stays BPE, as Gemma 4's does; otherwise it becomes SentencePiece's.
    """
    tokenizer = Tokenizer.from_folder(folder)
    vocabulary = tokenizer.vocabulary
    data = read_object(folder / "tokenizer.json")
    values = read_model(data, folder, tokenizer, chars)
    pieces = list_tokens(tokenizer, rows)
    values["tokens"] = [text or f"[PAD{i}]" for i, text in enumerate(pieces)]
    defined = [] if data else read_scores(read_bytes(folder / "tokenizer.model"))[1]
    values["token_type"] = list_types(tokenizer, pieces, defined, is_spm=values["model"] == "llama")
    if "scores" in values:
        values["scores"] = [values["scores"].get(text, NO_MERGE) for text in pieces]
    values |= special_tokens(tokenizer, pieces, stops)
    made = {PREFIX + key: value for key, value in values.items()}
    for name, text in vocabulary.templates.items():
        made["tokenizer.chat_template" + ("" if name == "default" else f".{name}")] = text
    if named := [name for name in vocabulary.templates if name != "default"]:
        made["tokenizer.chat_templates"] = named
    return made


def strips_space(folder: Path) -> bool:
    """Whether special tokens swallow the white space after them, as Phi-3's do."""
    added = read_object(folder / "tokenizer.json").get("added_tokens", ())
    return any(token.get("rstrip") for token in added) or any(token.rstrip for token in read_settings(folder).added)


def check_alike(folder: Path, metadata: Mapping[str, Any]) -> None:
    """Refuse metadata that would encode plain text differently; report where only special tokens do."""
    ours, theirs = Tokenizer.from_folder(folder), Tokenizer.from_gguf(metadata)
    added = sorted(ours.vocabulary.added, key=len, reverse=True)
    for text in PROBES:
        for special in added:
            text = text.replace(special, "")
        tokens = ours.encode(text)
        if tokens != theirs.encode(text) or ours.decode(tokens) != theirs.decode(tokens):
            raise BadTokenizer(
                f"{folder}: its tokenizer cannot be written as GGUF: {quote(text[:30])} would be encoded differently; "
                "leave it out with --no-tokenizer"
            )
    names = [ours.vocabulary.names[name] for name in sorted(ours.vocabulary.names)]
    text = " hello ".join(["", *names, ""])
    if ours.encode(text) != theirs.encode(text):
        log.warning("GGUF tokenizers treat white space beside special tokens in another way than this one does")


def read_model(data: Mapping[str, Any], folder: Path, tokenizer: Tokenizer, chars: bool) -> Values:
    """model, and what it merges by: pre and merges, or the scores of texts."""
    if not data:
        scores, _ = read_scores(read_bytes(folder / "tokenizer.model"))
        return {"model": "llama", "scores": scores, "add_space_prefix": has_prefix(tokenizer)}
    model = data.get("model")
    kind = model.get("type", "BPE" if "merges" in model else None) if isinstance(model, dict) else None
    if not isinstance(model, dict) or kind != "BPE":
        raise BadTokenizer(f"{folder}: tokenizer.json holds a {quote(kind)} model; GGUF is written for BPE only")
    merges = [tuple(m.split(" ", 1)) if isinstance(m, str) else tuple(m) for m in model.get("merges", ())]
    if model.get("byte_fallback"):
        if chars:
            return {"model": "gemma4", "merges": [" ".join(pair) for pair in merges]}
        return {"model": "llama", "scores": rank_scores(merges), "add_space_prefix": has_prefix(tokenizer)}
    check_normalizer(folder, data.get("normalizer"))
    pre = name_pretokenizer(folder, data.get("pre_tokenizer"), bool(model.get("ignore_merges")))
    return {"model": "gpt2", "pre": pre, "merges": [" ".join(pair) for pair in merges]}


def rank_scores(merges: Iterable[tuple[str, ...]]) -> dict[str, float]:
    """Scores of texts: the sooner a merge makes one, the higher."""
    scores: dict[str, float] = {}
    for rank, pair in enumerate(merges):
        scores.setdefault("".join(pair), float(-rank))
    return scores


def has_prefix(tokenizer: Tokenizer) -> bool:
    """Whether a text gets a space before it."""
    [first, *_] = tokenizer.encode("a", special=False)
    return str(tokenizer.vocabulary.piece(first)).startswith(SPACE)


def flatten(spec: Any, inside: str) -> list[Mapping[str, Any]]:
    """The steps of a Sequence, or the one step."""
    if spec is None:
        return []
    if spec.get("type") != "Sequence":
        return [spec]
    return [step for part in spec.get(inside, ()) for step in flatten(part, inside)]


def check_normalizer(folder: Path, spec: Any) -> None:
    kinds = [str(step.get("type")) for step in flatten(spec, "normalizers")]
    if kinds == ["NFC"]:
        log.info("the tokenizer composes characters (NFC), for which GGUF has no key: other text is encoded as it is")
    elif kinds:
        raise BadTokenizer(f"{folder}: the normalizer {', '.join(kinds)} of tokenizer.json has no form in GGUF")


def name_pretokenizer(folder: Path, spec: Any, ignore_merges: bool) -> str:
    """The name in llama.cpp's table that means these splits."""
    splits = tuple(text for step in flatten(spec, "pretokenizers") for text in read_splits(folder, step))
    named = [(name, pre) for name, pre in pretokenizers().items() if pre.splits == splits]
    fitting = [name for name, pre in named if pre.ignore_merges == ignore_merges] or [name for name, _ in named]
    if not fitting:
        raise BadTokenizer(
            f"{folder}: the pre-tokenizer {quote(' then '.join(splits))} has no name in llama.cpp; "
            "leave the tokenizer out with --no-tokenizer"
        )
    return fitting[0]


def read_splits(folder: Path, step: Mapping[str, Any]) -> list[str]:
    kind, pattern = step.get("type"), step.get("pattern")
    isolated = (step.get("behavior"), step.get("invert")) in (("Isolated", False), ("Removed", True))
    if kind == "Split" and isolated and isinstance(pattern, dict) and isinstance(pattern.get("Regex"), str):
        return [pattern["Regex"]]
    if kind == "Digits":
        return [r"\p{N}" if step.get("individual_digits") else r"\p{N}+"]
    if kind == "ByteLevel" and not step.get("add_prefix_space"):
        return [GPT_2_SPLIT] if step.get("use_regex", True) else []
    raise BadTokenizer(f"{folder}: the pre-tokenizer {quote(json.dumps(step))} has no form in GGUF")


def list_tokens(tokenizer: Tokenizer, rows: int) -> list[str | None]:
    """The texts of all ids below `rows`: files have as many tokens as embeddings."""
    vocabulary = tokenizer.vocabulary
    if (lost := vocabulary.size - rows) > 0:
        log.info(f"{lost} tokens have no embedding and are left out, the first is {vocabulary.piece(rows)!r:.60}")
    return [vocabulary.piece(i) if i < vocabulary.size else None for i in range(rows)]


def list_types(
    tokenizer: Tokenizer, pieces: Sequence[str | None], defined: Container[str | None], is_spm: bool
) -> list[int]:
    """`defined`: texts that are matched before anything else and that the tokenizer does not list as added."""
    vocabulary = tokenizer.vocabulary
    types = [UNUSED if text is None else USER_DEFINED if text in defined else NORMAL for text in pieces]
    for i, text in enumerate(pieces):
        if text is not None and BYTE_TOKEN.fullmatch(text):
            types[i] = BYTE
    for i in (*vocabulary.added.values(), *vocabulary.special_ids):
        if i < len(types):
            types[i] = CONTROL if i in vocabulary.special_ids else USER_DEFINED
    unknown = vocabulary.names.get("unk_token")
    if is_spm and unknown in pieces:
        types[pieces.index(unknown)] = UNKNOWN
    return types


def special_tokens(tokenizer: Tokenizer, pieces: Sequence[str | None], stops: Sequence[int]) -> Values:
    """Ids of tokens with a role, and whether BOS and EOS are added to every text."""
    vocabulary = tokenizer.vocabulary
    ids = {text: i for i, text in reversed(list(enumerate(pieces))) if text is not None}
    roles = {"bos": "bos_token"} | {key: f"{name}_token" for key, name in NAMES.items()}
    named = {role: ids.get(vocabulary.names.get(name, "")) for role, name in roles.items()}
    ends = [*dict.fromkeys([*sorted(vocabulary.eos_ids), *stops])]
    ends = [end for end in ends if end < len(pieces)]
    named |= dict(zip(STOPS, ends))
    if more := [pieces[end] for end in ends[len(STOPS) :] if pieces[end] not in TURN_ENDS]:
        log.warning(f"GGUF has room for three tokens that end an answer: {', '.join(map(quote, more))} will not")
    plain, special = tokenizer.encode("a", special=False), tokenizer.encode("a")
    added = {"add_bos_token": special[:1] != plain[:1], "add_eos_token": special[-1:] != plain[-1:]}
    return {f"{role}_token_id": token for role, token in named.items() if token is not None} | added
