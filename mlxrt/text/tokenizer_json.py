"""Vocabularies out of tokenizer.json, run by the tokenizers library; only turning tokens into text is our own."""

import hashlib
import json
from dataclasses import asdict

from ..errors import BadTokenizer
from .decoders import clean_up, recipe
from .rust import rust_call
from .settings import Settings
from .vocabulary import Vocabulary


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
    """Tokens that only the configuration knows, after those of tokenizer.json; the named ones count as special."""
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
    """Llama's classes have add_bos_token and add_eos_token; where given, they overrule tokenizer.json (DeepSeek's)."""
    from tokenizers import processors

    if not settings.llama_like or (settings.add_bos is None and settings.add_eos is None):
        return
    bos, eos = settings.names.get("bos_token"), settings.names.get("eos_token")
    before, after = [bos] if settings.add_bos and bos else [], [eos] if settings.add_eos and eos else []
    used = [(text, backend.token_to_id(text)) for text in dict.fromkeys(before + after)]
    backend.post_processor = processors.TemplateProcessing(single=[*before, "$A", *after], special_tokens=used)


def assemble(backend, settings: Settings, digest: str) -> Vocabulary:
    steps = recipe(json.loads(backend.decoder.__getstate__()) if backend.decoder else None)
    is_bpe = type(backend.model).__name__ == "BPE"
    if settings.clean_up and (not is_bpe or settings.clean_up_bpe):
        steps = steps + clean_up()
    ids = backend.get_vocab(with_added_tokens=True)
    if not ids:
        raise BadTokenizer("tokenizer.json holds no tokens")
    names = {role: backend.token_to_id(text) for role, text in settings.names.items()}
    ends = {names["eos_token"]} - {None} if "eos_token" in names else set()
    processor = str(backend.post_processor)
    added = backend.get_added_tokens_decoder().items()
    told = [digest, repr(settings.added), settings.extra, processor, len(steps)]
    return Vocabulary(
        size=max(ids.values()) + 1,
        encode=lambda text, special: (
            rust_call("tokenizer.json", lambda: backend.encode(text, None, False, special)).ids
        ),
        piece=backend.id_to_token,
        hidden=frozenset(i for i, token in added if token.special),
        stages=lambda: [make() for make in steps],
        bos=names.get("bos_token"),
        ends=frozenset(ends),
        names=settings.names,
        templates=settings.templates,
        digest=hashlib.sha256(json.dumps([*told, settings.split_special]).encode()).hexdigest(),
    )
