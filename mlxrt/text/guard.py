"""Keeps message contents from writing special tokens: a user who types `<|im_end|>` must not end a turn.

Special strings inside what a request brings are broken up by a mark before the template runs, so that every whole one
in the rendered text was written by the template. Those are put between guards, the marks are taken out, and an encoder
that knows the special tokens only between guards makes ids of it. Marks and guards cannot be forged: they hold a number
drawn for this process. A request without such strings is encoded as it is.
"""

import re
import secrets
from collections.abc import Collection, Iterable, Mapping
from typing import Any

MARKER_LIKE = re.compile(r"[<\[(].*[|｜▁].*[>\])]")


class SpecialTextGuard:
    def __init__(self, structural: Iterable[str]):
        number = str(secrets.randbits(64))  # digits: no filter of a template changes them
        self._mark = f"\ufdd2{number}\ufdd2"
        self._written = re.compile(re.escape(self._mark) + "|" + rf"\\ufdd2{number}\\ufdd2", re.IGNORECASE)
        names = sorted({text for text in structural if text}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, names)) or "(?!)")
        before, after = f"\ufdd0{number}\ufdd0", f"\ufdd1{number}\ufdd1"
        self.forms = {name: before + name + after for name in names}
        self._guards = re.compile(f"{before}|{after}")

    def protect(self, value: Any) -> tuple[Any, bool]:
        """The value with every special string in it broken up, and whether there was one."""
        if isinstance(value, str):
            return self._break(value) if self._pattern.search(value) else (value, False)
        if isinstance(value, Mapping):
            rows = [(self.protect(key), self.protect(one)) for key, one in value.items()]
            return {k: v for (k, _), (v, _) in rows}, any(a or b for (_, a), (_, b) in rows)
        if isinstance(value, (list, tuple)):
            items = [self.protect(one) for one in value]
            return [one for one, _ in items], any(found for _, found in items)
        return value, False

    def _break(self, text: str) -> tuple[str, bool]:
        parts, at = [], 0
        while found := self._pattern.search(text, at):
            cut = found.start() + 1
            parts += [text[at:cut], self._mark]
            at = cut  # the rest may hold another
        return "".join([*parts, text[at:]]), True

    def remove_marks(self, rendered: str) -> str:
        return self._written.sub("", rendered)

    def remove_guards(self, text: str) -> str:
        return self._guards.sub("", text)

    def add_guards(self, rendered: str) -> str:
        """The rendered text with guards around the special strings the template wrote, and no marks."""
        return self.remove_marks(self._pattern.sub(lambda found: self.forms[found[0]], rendered))


def find_structural(
    added: Mapping[str, int], special: Collection[int], sources: Iterable[str], markers: Iterable[str]
) -> set[str]:
    """The added tokens that give a prompt its structure.

    Those that are special, look like it, or are written by the templates or read by the parsers. Vocabularies add plain
    text too (runs of spaces, HTML tags): that stays one token for everybody.
    """
    source, known = "\n".join(sources), set(markers)
    return {
        text
        for text, id in added.items()
        if text.strip() and (id in special or text in known or text in source or MARKER_LIKE.fullmatch(text))
        and len(text) > 1
    }  # fmt: skip
