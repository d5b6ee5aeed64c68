"""What mlxrt logs, as a list of lines: tests ask it what a user was told."""

import logging

LOG = logging.getLogger("mlxrt")


class Lines(logging.Handler):
    def __init__(self, prefix: str) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        self.prefix = prefix

    def emit(self, record: logging.LogRecord) -> None:
        if (line := record.getMessage()).startswith(self.prefix):
            self.lines.append(line)


def capture_log(prefix: str = "") -> list[str]:
    """The lines that begin so and are logged from now on, until the test ends."""
    handler = Lines(prefix)
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)
    return handler.lines


def reset_log() -> None:
    """As in a new process: no handler, neither a test's nor the command's."""
    for handler in list(LOG.handlers):
        LOG.removeHandler(handler)
    LOG.setLevel(logging.NOTSET)
    LOG.propagate = True
