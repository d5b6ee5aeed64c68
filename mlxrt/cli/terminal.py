"""What a person sees on stderr: log lines, notes, colours where a terminal shows them, byte counts in readable units.

Plain escape codes: rich takes as long to import as a small model takes to its first token, so it is left to progress
bars, which are only drawn while something is downloaded.
"""

import logging
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from ..errors import BadRequest
from .flags import Parser

STYLES = {"red": "31", "dim": "2", "bold": "1", "green": "32"}
LOG_NAMES = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def use_color(stream: TextIO) -> bool:
    """Whether the stream wants colours (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text: str, style: str, stream: TextIO) -> str:
    return f"\033[{STYLES[style]}m{text}\033[0m" if use_color(stream) else text


def note(line: str) -> None:
    """Print one dim line on stderr, beside the answer on stdout."""
    print(paint(one_line(line), "dim", sys.stderr), file=sys.stderr, flush=True)


def print_warning(line: str) -> None:
    """Print one line on stderr that --quiet does not hide."""
    print(paint(one_line(line), "bold", sys.stderr), file=sys.stderr, flush=True)


def one_line(text: str) -> str:
    """Escape control characters: names and keys come from files and could move the cursor."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def format_bytes(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


class NoteHandler(logging.Handler):
    """Shows log records as notes."""

    def emit(self, record: logging.LogRecord) -> None:
        note(record.getMessage())
        text = record.exc_text or ""
        if record.exc_info and record.exc_info[0]:
            text = "".join(traceback.format_exception(*record.exc_info))
        for line in text.splitlines():  # of a defect: whoever reports it needs to see where it is
            note(line)


HANDLER = NoteHandler()


def add_log_flags(parser: Parser) -> None:
    group = parser.add_argument_group("log")
    group.add_argument("-v", "--verbose", action="store_true", help="show debug lines too")
    group.add_argument("-q", "--quiet", action="store_true", help="show warnings only")


def configure_logging(verbose: bool, quiet: bool) -> None:
    """Print the `mlxrt` log on stderr from here on; flags win over MLXRT_LOG."""
    name = os.environ.get("MLXRT_LOG", "").lower() or "info"
    if name not in LOG_NAMES:
        raise BadRequest(f"MLXRT_LOG must be one of {', '.join(LOG_NAMES)}, not {name!r}")
    log = logging.getLogger("mlxrt")
    log.setLevel(logging.WARNING if quiet else logging.DEBUG if verbose else LOG_NAMES[name])
    log.propagate = False  # a root handler would print every line twice
    if HANDLER not in log.handlers:
        log.addHandler(HANDLER)


@contextmanager
def mute_log() -> Iterator[None]:
    """Hide log lines below ERROR, for a model whose load was logged before."""
    before = HANDLER.level
    HANDLER.setLevel(logging.ERROR)
    try:
        yield
    finally:
        HANDLER.setLevel(before)
