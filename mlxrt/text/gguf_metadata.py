"""The tokenizer keys of GGUF metadata (tokenizer.ggml.*), type-checked as they are read."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import BadTokenizer
from .vocabulary import is_encodable

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
PREFIX = "tokenizer.ggml."


@dataclass(frozen=True)
class TokenizerMetadata:
    """`values` are as in the file: str, int, float, bool and lists of these."""

    values: Mapping[str, Any]

    def text(self, key: str) -> str | None:
        value = self.values.get(PREFIX + key)
        if value is not None and not isinstance(value, str):
            raise BadTokenizer(f"{PREFIX}{key} must be a string, not {type(value).__name__}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(PREFIX + key, default)
        if not isinstance(value, bool):
            raise BadTokenizer(f"{PREFIX}{key} must be true or false, not {value!r:.40}")
        return value

    def token(self, key: str, size: int, default: int | None = None) -> int | None:
        """A token id, checked against the vocabulary; `default` applies only if the vocabulary has it."""
        name = f"{PREFIX}{key}_token_id"
        if name not in self.values:
            return default if default is not None and default < size else None
        value = self.values[name]
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < size:
            raise BadTokenizer(f"{name} is {value!r:.40}; the vocabulary has ids 0 to {size - 1}")
        return value

    def rows(self, key: str, types: tuple[type, ...], size: int | None = None) -> list:
        """A required list of the given types, of length `size` if given."""
        value = self.values.get(PREFIX + key)
        if not isinstance(value, list):
            found = "is missing" if value is None else f"is a {type(value).__name__}"
            raise BadTokenizer(f"{PREFIX}{key} must be a list, and {found}; convert the model to GGUF again")
        wrong = {type(v) for v in value} - set(types)
        if wrong:
            expected, found = (" or ".join(sorted(t.__name__ for t in some)) for some in (types, wrong))
            raise BadTokenizer(f"{PREFIX}{key} must hold {expected} only, not {found}")
        if size is not None and len(value) != size:
            raise BadTokenizer(f"{PREFIX}{key} has {len(value)} entries for {size} tokens")
        return value

    def tokens(self) -> dict[str, int]:
        """Ids by text; an empty token gets a placeholder text, so that ids stay positions."""
        rows = self.rows("tokens", (str,))
        if not rows:
            raise BadTokenizer(f"{PREFIX}tokens is empty")
        ids = {text or f"[EMPTY_{i}]": i for i, text in enumerate(rows)}
        if len(ids) != len(rows):
            again = next(t for i, t in enumerate(rows) if ids.get(t or f"[EMPTY_{i}]") != i)
            raise BadTokenizer(f"{PREFIX}tokens holds {again!r:.60} twice")
        if bad := next((t for t in ids if not is_encodable(t)), None):
            raise BadTokenizer(f"{PREFIX}tokens holds {bad!a:.60}, which is not valid text")
        return ids

    def types(self, size: int) -> list[int]:
        if PREFIX + "token_type" not in self.values:
            return [NORMAL] * size
        return self.rows("token_type", (int,), size)

    def scores(self, size: int) -> list[float]:
        rows = self.rows("scores", (float, int), size)
        if not all(isinstance(s, int) or math.isfinite(s) for s in rows):
            raise BadTokenizer(f"{PREFIX}scores must be finite numbers")
        return rows

    def merges(self) -> list[tuple[str, str]]:
        pairs = []
        for i, text in enumerate(self.rows("merges", (str,))):
            cut = text.find(" ", 1)
            if cut < 0 or cut == len(text) - 1:
                raise BadTokenizer(f"{PREFIX}merges[{i}] is {text!r:.60}; expected two tokens with a space between")
            pairs.append((text[:cut], text[cut + 1 :]))
        return pairs

    def templates(self) -> dict[str, str]:
        """The default chat template and the named ones."""
        key = "tokenizer.chat_template"
        found = {
            ("default" if k == key else k[len(key) + 1 :]): v for k, v in self.values.items() if is_template_key(k, key)
        }
        if wrong := [k for k, v in found.items() if not isinstance(v, str)]:
            raise BadTokenizer(f"the chat template {wrong[0]} must be a string, not {type(found[wrong[0]]).__name__}")
        return found


def is_template_key(key: object, stem: str) -> bool:
    return key == stem or (isinstance(key, str) and key.startswith(stem + "."))
