"""One measurement at a time: processes build and compile side by side, and each measures while it has the turn.

MLX compiles its own kernels in every process (gather_qmm alone takes 40 s): what one process after another would take
minutes for is done at once. Nobody measures before as many as MLXRT_TURN says are ready: a host that still compiles for
others launches more slowly.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE = 300.0  # seconds; one that failed never gets ready


@contextmanager
def turn(path: str | None) -> Iterator[None]:
    """While holding a lock on this file; at once where there is none."""
    if path is None:
        yield
        return
    wait(path + ".ready", int(os.environ.get("MLXRT_TURN", 1)))
    lock = os.open(path, os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def wait(path: str, number: int) -> None:
    """Until so many have written their byte."""
    with open(path, "ab") as f:
        f.write(b".")
    end = time.monotonic() + PATIENCE
    while (ready := os.path.getsize(path)) < number:
        if time.monotonic() > end:
            print(f"only {ready} of {number} are ready after {PATIENCE:.0f} s: what follows is not a quiet measurement")
            return
        time.sleep(0.5)
