"""Calls written in Python, `name(key="value")`: Llama's built-in tools, and SmolLM3's `<code>` blocks."""

import ast
import json
from typing import Any

from .calls import Block, CallFormat, RawCall
from .lexer import Item

OPEN, CLOSE = "<code>", "</code>"
MAX_SOURCE = 100_000  # characters: Python's own parser has no limit on memory


class CodeBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self._body = ""

    def push(self, item: Item) -> int | None:
        if item.marker == CLOSE:
            self.closed = True
            return len(item.raw)
        if item.marker:
            return None if item.marker == OPEN and not self._body else 0
        self._body += item.text
        return None

    def read_calls(self) -> list[RawCall] | None:
        return read_python_calls(self._body) if self.closed else None


def read_python_calls(source: str) -> list[RawCall] | None:
    """Calls of functions with literal keyword arguments, one a line; None: something else."""
    source = source.strip()
    if not source or len(source) > MAX_SOURCE:
        return None
    try:
        body = ast.parse(source).body
        calls = [read_call(statement) for statement in body]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return calls


def read_call(statement: ast.stmt) -> RawCall:
    """ValueError when the statement is no such call."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or call.args:
        raise ValueError("not a call with keyword arguments")
    arguments: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise ValueError("** has no name")
        arguments[keyword.arg] = ast.literal_eval(keyword.value)
    return RawCall(read_name(call.func), json.dumps(arguments, ensure_ascii=False))


def read_name(function: ast.expr) -> str:
    """f(...) and f.call(...) call f."""
    if isinstance(function, ast.Attribute) and function.attr == "call":
        function = function.value
    if isinstance(function, ast.Attribute):
        return f"{read_name(function.value)}.{function.attr}"
    if not isinstance(function, ast.Name):
        raise ValueError("the function has no name")
    return function.id


PYTHON = CallFormat("python", lambda _: CodeBlock(), opens=(OPEN,), closes=(CLOSE,))
