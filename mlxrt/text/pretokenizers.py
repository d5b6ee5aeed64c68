"""Pre-tokenizers of byte-level BPE in GGUF files, by the name in `tokenizer.ggml.pre`.

Each is a list of regular expressions applied in turn: a match becomes a word, the text between matches goes to the
next. Unknown names are refused: a guess would give wrong tokens.
"""

import functools
import tomllib
from dataclasses import dataclass
from importlib.resources import files

from ..errors import BadTokenizer


@dataclass(frozen=True)
class PreTokenizer:
    splits: tuple[str, ...]
    ignore_merges: bool = False  # a word that is a token is not merged (llama.cpp's and tokenizers' name)
    add_bos: bool = False  # unless the file says otherwise


@functools.cache
def pretokenizers() -> dict[str, PreTokenizer]:
    """All of them, by name."""
    found: dict[str, PreTokenizer] = {}
    for row in tomllib.loads((files(__package__) / "pretokenizers.toml").read_text("utf-8"))["pretokenizer"]:
        names, splits = row.pop("names"), tuple(row.pop("splits"))
        found |= dict.fromkeys(names, PreTokenizer(splits, **row))
    return found


def find_pretokenizer(name: str) -> PreTokenizer:
    if name in (known := pretokenizers()):
        return known[name]
    raise BadTokenizer(f"tokenizer.ggml.pre is {name!r}, which mlxrt does not know; known: {', '.join(sorted(known))}")
