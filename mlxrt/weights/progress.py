"""A progress bar while weights are read or unpacked: on a terminal, and where the log is not quiet."""

import logging
import sys
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")
log = logging.getLogger("mlxrt")


def track(items: Sequence[T], what: str) -> Iterator[T]:
    """The items, one after the other; the bar disappears after the last."""
    if not sys.stderr.isatty() or log.level > logging.INFO:
        yield from items
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(items, what, console=Console(stderr=True), transient=True)
