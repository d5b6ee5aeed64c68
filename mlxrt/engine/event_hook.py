"""Tells whoever watches an engine what happens to its requests. A watcher that fails is told off and left out."""

import logging
import time
from collections.abc import Callable

from .request import EngineEvent, Finish, Sequence

log = logging.getLogger("mlxrt")


class Watch:
    def __init__(self, hook: Callable[[EngineEvent], None] | None):
        self._hook = hook

    def tell(self, kind: str, seq: Sequence, reason: Finish | None = None) -> None:
        if self._hook is None:
            return
        made = len(seq.tokens) - len(seq.prompt)
        try:
            self._hook(EngineEvent(kind, seq.id, time.perf_counter(), len(seq.prompt), made, reason))
        except Exception as error:  # a user's code may raise anything; no request may suffer from it
            self._hook = None
            log.warning(f"on_event raised {error!r}: it is not called any more")
