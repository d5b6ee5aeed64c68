"""What a person sees: notes on stderr, colours where a terminal shows them, amounts in readable units.

Plain escape codes: rich takes as long to import as a small model takes to its first token, so it is left to progress
bars, which are only drawn while something is fetched anyway.
"""

import os
import sys
from typing import TextIO

STYLES = {"red": "31", "dim": "2", "bold": "1", "green": "32"}


def coloured(stream: TextIO) -> bool:
    """Whether colours are wanted there (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text: str, style: str, stream: TextIO) -> str:
    return f"\033[{STYLES[style]}m{text}\033[0m" if coloured(stream) else text


def note(line: str) -> None:
    """A line worth knowing, beside the answer."""
    print(paint(one_line(line), "dim", sys.stderr), file=sys.stderr, flush=True)


def one_line(text: str) -> str:
    """Names and keys come from files: what would move the cursor or start a new line is spelled out."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def amount(count: float) -> str:
    """Bytes as people write them."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
