"""Ctrl-C while the modules of the command `mlxrt` are imported: one line and exit code 130, no traceback.

A program that imports the package keeps its own handling. Everything here is built in, so that there is no import to
interrupt before it.
"""

import _signal
import os
import sys

EXIT_CODE = 130


def end_process(*_) -> None:
    os.write(2, b"mlxrt: interrupted\n")
    os._exit(EXIT_CODE)  # nothing was begun: no file to close, no output to flush


def is_command() -> bool:
    """Is this process the command: its script, or `python -m mlxrt`, whose own path is not known yet?"""
    program = sys.argv[0] if sys.argv else ""
    given = sys.orig_argv
    if program == "-m":
        return "-m" in given and given[given.index("-m") + 1 :][:1] == [__package__]
    return os.path.basename(program) in (__package__, f"{__package__}.exe")


def end_quietly() -> None:
    if is_command() and _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, end_process)


def raise_again() -> None:
    """From here on Ctrl-C is a KeyboardInterrupt, which the command handles."""
    if _signal.getsignal(_signal.SIGINT) is end_process:
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)
