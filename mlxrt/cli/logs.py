"""How log lines reach a person: notes on stderr, as many as -v, -q or MLXRT_LOG ask for."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import BadRequest
from .flags import Parser
from .terminal import note

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class NoteHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        note(record.getMessage())


HANDLER = NoteHandler()


def add_log_flags(parser: Parser) -> None:
    group = parser.add_argument_group("log")
    group.add_argument("-v", "--verbose", action="store_true", help="show debug lines too")
    group.add_argument("-q", "--quiet", action="store_true", help="show warnings only")


def show_log(verbose: bool, quiet: bool) -> None:
    """Print the lines of the `mlxrt` log from here on; flags win over MLXRT_LOG."""
    name = os.environ.get("MLXRT_LOG", "").lower() or "info"
    if name not in LEVELS:
        raise BadRequest(f"MLXRT_LOG must be one of {', '.join(LEVELS)}, not {name!r}")
    level = logging.WARNING if quiet else logging.DEBUG if verbose else LEVELS[name]
    log = logging.getLogger("mlxrt")
    log.setLevel(level)
    log.propagate = False  # a root handler would print every line twice
    if HANDLER not in log.handlers:
        log.addHandler(HANDLER)


@contextmanager
def hidden_log() -> Iterator[None]:
    """Show nothing meanwhile: lines that were shown when the same model was loaded before."""
    before = HANDLER.level
    HANDLER.setLevel(logging.ERROR)
    try:
        yield
    finally:
        HANDLER.setLevel(before)
