"""What mlxrt logs, as a list of lines: tests ask it what a user was told."""

import logging

LOG = logging.getLogger("mlxrt")
OPEN: list["Lines"] = []


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def capture_log() -> list[str]:
    """The lines logged from now on, until the test ends."""
    handler = Lines()
    OPEN.append(handler)
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)
    return handler.lines


def stop_capturing() -> None:
    while OPEN:
        LOG.removeHandler(OPEN.pop())
