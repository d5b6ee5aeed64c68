"""Ctrl-C as a question that is asked between two tokens.

An exception in the middle of a step would leave the engine's books half written; a conversation that goes on after
it could not be trusted.
"""

import signal
from collections.abc import Callable
from typing import Self


class Interrupt:
    """Holds Ctrl-C back while `patient()` says so; `asked` tells. A second one is not held back."""

    def __init__(self, patient: Callable[[], bool]):
        self.asked, self._patient = False, patient

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._hear)
        return self

    def __exit__(self, *_) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _hear(self, number, frame) -> None:
        if self.asked or not self._patient():
            raise KeyboardInterrupt
        self.asked = True
