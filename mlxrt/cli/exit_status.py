"""Exit status: an error becomes one line on stderr and a code; an unexpected exception keeps its traceback."""

import io
import os
import sys
from collections.abc import Callable

from ..errors import NO_BACKEND, MlxrtError, is_out_of_memory
from .terminal import one_line, paint

FAILED, INTERRUPTED = 1, 130


def run_guarded(work: Callable[[], int]) -> int:
    """Run `work` and return the exit code."""
    if problem := prepare_streams():
        print_error(problem)
        return FAILED
    try:
        code = work()
        sys.stdout.flush()
        return code
    except MlxrtError as error:
        print_error(str(error))
        return error.exit_code
    except ImportError:
        if (fault := find_backend_fault()) is None:
            raise
        print_error(f"{NO_BACKEND} ({fault})")
        return FAILED
    except KeyboardInterrupt:
        print_error("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        discard_output(sys.stdout)  # also what Python flushes at exit
        return FAILED
    except MemoryError:
        print_error("out of memory; use a smaller model, a smaller max_context or a smaller kv_memory")
        return FAILED
    except OSError as error:
        path = f"{error.filename}: " if error.filename is not None else ""
        print_error(f"{path}{error.strerror or error}")
        return FAILED
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        print_error(f"the device is out of memory ({error}); use a smaller model or a smaller kv_memory")
        return FAILED


def find_backend_fault() -> ImportError | None:
    """Why MLX cannot be imported, if it cannot. An error that names neither mlx nor a backend may come of it."""
    try:
        import mlx.core  # noqa: F401
    except ImportError as error:
        return error
    return None


def prepare_streams() -> str | None:
    """Set the standard streams to UTF-8; returns what is wrong with them, if anything."""
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


def print_error(message: str) -> None:
    try:
        print(paint(f"mlxrt: {one_line(message)}", "red", sys.stderr), file=sys.stderr, flush=True)
    except BrokenPipeError:
        discard_output(sys.stderr)


def discard_output(stream) -> None:
    """Point the stream at /dev/null: its reader has gone."""
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, stream.fileno())
    finally:
        os.close(null)
