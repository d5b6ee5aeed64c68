"""How a run ends: what was raised becomes one line on stderr and an exit code.

Knows no command. An exception that nobody foresaw is a bug and keeps its traceback.
"""

import io
import os
import sys
from collections.abc import Callable

from ..errors import MlxrtError
from .terminal import one_line, paint

FAILED, INTERRUPTED = 1, 130


def guarded(work: Callable[[], int]) -> int:
    """The exit code of `work`."""
    if problem := open_streams():
        complain(problem)
        return FAILED
    try:
        code = work()
        sys.stdout.flush()
        return code
    except MlxrtError as error:
        complain(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        complain("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        return abandon()
    except MemoryError:
        complain("out of memory; use a smaller model, a smaller max_context or a smaller kv_memory")
        return FAILED
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        complain(f"{where}{error.strerror or error}")
        return FAILED
    except RuntimeError as error:
        if "allocate" not in str(error):  # how MLX says that a device is full
            raise
        complain(f"the device is out of memory ({error}); use a smaller model or a smaller kv_memory")
        return FAILED


def open_streams() -> str | None:
    """Make the standard streams speak UTF-8; what is wrong with them, if anything."""
    if sys.stdin is None:  # a file opened later would get descriptor 0, which MLX takes for a failure
        sys.stdin = open(os.devnull)  # noqa: SIM115  lives as long as the process
    if sys.stderr is None:  # closed by the shell: print() would fall back on stdout
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  lives as long as the process
    if sys.stdout is None:
        return "stdout is closed; there is nowhere to write the answer"
    for stream, errors in ((sys.stdout, "replace"), (sys.stderr, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors=errors)
    return None


def complain(message: str) -> None:
    try:
        print(paint(f"mlxrt: {one_line(message)}", "red", sys.stderr), file=sys.stderr, flush=True)
    except BrokenPipeError:
        silence(sys.stderr)


def abandon() -> int:
    """Whoever read our output has left: say nothing, also not when Python flushes at its end."""
    silence(sys.stdout)
    return FAILED


def silence(stream) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, stream.fileno())
    finally:
        os.close(nowhere)
