"""Reads tokenizer.json. The tokenizers library encodes; decoding is ours, because it must stream exactly."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict

from ..errors import BadTokenizer
from .decoders import build_stages, clean_up_stages
from .tokenizer_config import Settings
from .vocabulary import Vocabulary, rust_call


def read_json(data: bytes, settings: Settings) -> Vocabulary:
    from tokenizers import Tokenizer

    backend = rust_call("tokenizer.json", lambda: Tokenizer.from_buffer(data))
    backend.no_truncation()  # a file may carry limits of the training run
    backend.no_padding()
    backend.encode_special_tokens = settings.split_special
    rust_call("the added tokens", lambda: add_tokens(backend, settings))
    rust_call("the post-processor", lambda: post_process(backend, settings))
    return assemble(backend, settings, hashlib.sha256(data).hexdigest())


def add_tokens(backend, settings: Settings) -> None:
    """Add the tokens that only tokenizer_config.json has; those with a role become special."""
    from tokenizers import AddedToken

    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    new = [asdict(one) for one in settings.added if one.text not in known]
    backend.add_tokens([AddedToken(one.pop("text"), **{k: v for k, v in one.items() if k != "id"}) for one in new])
    for one in settings.added:
        if (found := backend.token_to_id(one.text)) != one.id:
            raise BadTokenizer(f"{one.text!r} is token {one.id} in tokenizer_config.json and {found} in tokenizer.json")
    named = dict.fromkeys([*settings.names.values(), *settings.extra])
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in named])


def post_process(backend, settings: Settings) -> None:
    """Llama's tokenizer classes let add_bos_token and add_eos_token overrule tokenizer.json (DeepSeek uses it)."""
    from tokenizers import processors

    if not settings.llama_like or (settings.add_bos is None and settings.add_eos is None):
        return
    bos, eos = settings.names.get("bos_token"), settings.names.get("eos_token")
    before, after = [bos] if settings.add_bos and bos else [], [eos] if settings.add_eos and eos else []
    used = [(text, backend.token_to_id(text)) for text in dict.fromkeys(before + after)]
    backend.post_processor = processors.TemplateProcessing(single=[*before, "$A", *after], special_tokens=used)


def rename_tokens(backend, forms: Mapping[str, str]) -> Callable[[str], list[int]]:
    """An encoder in which these added tokens are matched only in another form, their ids unchanged."""
    from tokenizers import AddedToken, Tokenizer

    model = backend.model
    own = any(model.token_to_id(text) is not None for text in forms)
    # BPE does not find a token that no merge makes, so its model can be shared; the others look up whole words.
    shares = type(model).__name__ == "BPE" and not (own and model.ignore_merges)
    copy = Tokenizer(model if shares else rename_vocabulary(backend, forms))
    for part in ("normalizer", "pre_tokenizer"):
        if getattr(backend, part) is not None:
            setattr(copy, part, getattr(backend, part))
    added = backend.get_added_tokens_decoder()
    written = {id: forms.get(token.content, token.content) for id, token in sorted(added.items())}
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    copy.add_tokens([AddedToken(form, **{f: getattr(added[id], f) for f in flags}) for id, form in written.items()])
    ids = {copy.token_to_id(form): id for id, form in written.items()}
    copy.encode_special_tokens = backend.encode_special_tokens

    def encode(text: str) -> list[int]:
        found = rust_call("tokenizer.json", lambda: copy.encode(text, add_special_tokens=False)).ids
        return [ids.get(id, id) for id in found]

    return encode


def rename_vocabulary(backend, forms: Mapping[str, str]):
    """A copy of the model in which these tokens have other texts."""
    from tokenizers import Tokenizer

    data = json.loads(backend.to_str())
    model, data["added_tokens"], data["post_processor"] = data["model"], [], None
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {forms.get(text, text): id for text, id in vocab.items()}
    else:  # Unigram: pieces with scores
        model["vocab"] = [[forms.get(text, text), score] for text, score in vocab]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = forms.get(model["unk_token"], model["unk_token"])
    return rust_call("tokenizer.json", lambda: Tokenizer.from_str(json.dumps(data))).model


def assemble(backend, settings: Settings, digest: str) -> Vocabulary:
    stages = build_stages(json.loads(backend.decoder.__getstate__()) if backend.decoder else None)
    is_bpe = type(backend.model).__name__ == "BPE"
    if settings.clean_up and (not is_bpe or settings.clean_up_bpe):
        stages = stages + clean_up_stages()
    ids = backend.get_vocab(with_added_tokens=True)
    if not ids:
        raise BadTokenizer("tokenizer.json holds no tokens")
    names = {role: backend.token_to_id(text) for role, text in settings.names.items()}
    eos_ids = {names["eos_token"]} - {None} if "eos_token" in names else set()
    processor = str(backend.post_processor)
    added = list(backend.get_added_tokens_decoder().items())
    parts = [digest, repr(settings.added), settings.extra, processor, len(stages)]
    return Vocabulary(
        size=max(ids.values()) + 1,
        encode=lambda text, special: (
            rust_call("tokenizer.json", lambda: backend.encode(text, None, False, special)).ids
        ),
        piece=backend.id_to_token,
        special_ids=frozenset(i for i, token in added if token.special),
        stages=lambda: [make() for make in stages],
        bos=names.get("bos_token"),
        eos_ids=frozenset(eos_ids),
        names=settings.names,
        templates=settings.templates,
        added={token.content: i for i, token in added},
        rename=lambda forms: rename_tokens(backend, forms),
        digest=hashlib.sha256(json.dumps([*parts, settings.split_special]).encode()).hexdigest(),
    )
