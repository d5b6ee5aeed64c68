"""The rules of a Lark grammar while it is being written."""

import json
from collections.abc import Callable


class LarkRules:
    """Rules that expressions refer to, each under a name of its own. `write` gives a text in Lark, markers included."""

    def __init__(self, write: Callable[[str], str]) -> None:
        self.write = write
        self.lines: list[str] = []
        self._reserved = 0

    def add(self, rule: str, attributes: str = "") -> str:
        name = self.reserve()
        self.define(name, rule, attributes)
        return name

    def reserve(self) -> str:
        """A name for a rule that refers to itself."""
        self._reserved += 1
        return f"part{self._reserved - 1}"

    def define(self, name: str, rule: str, attributes: str = "") -> None:
        self.lines.append(f"{name}{attributes}: {rule}")


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
