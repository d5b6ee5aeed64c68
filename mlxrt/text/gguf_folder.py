"""A GGUF's byte-level BPE vocabulary as the tokenizer files of a folder, for converters.

Only what can be said there exactly: the caller compares both on a text before it relies on the files.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .gguf_vocab import bpe, split_words
from .metadata import Metadata
from .pretokenizers import scheme


def write_folder(folder: Path, metadata: Mapping[str, Any]) -> bool:
    """Whether tokenizer.json and tokenizer_config.json could be written: other vocabularies have no such form."""
    from tokenizers import decoders

    told = Metadata(metadata)
    if told.text("model") != "gpt2":
        return False
    ids = told.tokens()
    cut = scheme(str(told.text("pre")))
    backend = bpe(told, ids, told.types(len(ids)), {"ignore_merges": cut.whole_words})
    split_words(backend, cut)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    texts, templates = list(ids), told.templates()
    names = {name: texts[token] for name in ("bos", "eos") if (token := told.token(name, len(ids))) is not None}
    said = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **({"chat_template": templates["default"]} if "default" in templates else {}),
        **{f"{name}_token": text for name, text in names.items()},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(said, ensure_ascii=False, indent=1), encoding="utf-8")
    return True
