"""One measurement at a time: processes build and compile side by side, and each measures while it has the turn.

MLX compiles its own kernels in every process (gather_qmm alone takes 40 s): what one process after another would take
minutes for is done at once. Nobody measures before MLXRT_TURN (seconds since 1970), when all are expected to be ready.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def turn(path: str | None) -> Iterator[None]:
    """While holding a lock on this file; at once where there is none."""
    if path is None:
        yield
        return
    time.sleep(max(0.0, float(os.environ.get("MLXRT_TURN", 0)) - time.time()))
    lock = os.open(path, os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
