"""Ctrl-C as a question that is asked between two tokens.

An exception in the middle of a step would leave the engine's books half written; a conversation that goes on after
it could not be trusted.
"""

import _signal  # what `signal` wraps: its names make an enum of every handler, which is a tenth of a step's Python
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self


class Interrupt:
    """Holds Ctrl-C back while `patient()` says so; `asked` tells. A second one is not held back.

    Where the shell has it ignored (a script's background job, nohup) it stays so."""

    def __init__(self, patient: Callable[[], bool]):
        self.asked, self._patient = False, patient
        self._before: Any = None

    def __enter__(self) -> Self:
        if _signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            self._before = _signal.signal(signal.SIGINT, self._hear)
        return self

    def __exit__(self, *_) -> None:
        if self._before is not None:
            _signal.signal(signal.SIGINT, self._before)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.asked or not self._patient():
            raise KeyboardInterrupt
        self.asked = True


class StepInterrupt(Interrupt):
    """Holds Ctrl-C back until a step is over, where Python's own way of hearing it is in place."""

    def __init__(self) -> None:
        super().__init__(lambda: True)

    def __enter__(self) -> Self:
        main = threading.current_thread() is threading.main_thread()  # the only one that can hear it
        if main and _signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            super().__enter__()
        return self
