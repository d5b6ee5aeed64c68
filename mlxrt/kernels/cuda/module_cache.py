"""Kernels in MLX's own cache of compiled modules, so that a launch need not carry their code.

MLX 0.32 finds the module of a custom kernel by a hash over its whole code, at every launch: 50 KB for attention, 10 us,
which is most of what a launch costs the host. But a module that it does not have yet it first looks for in its cache
folder, under that same hash. So the code goes into that folder, and kernels are launched with a few bytes in its place.
Whether that works is found out by a trial (nvrtc.py); where it does not, launches carry their code.

MLX writes a module in three steps, NAME.ptx, then NAME.txt with the names of its kernels, then NAME.cu, and reads
whatever is there. A process that is killed in between, or a full disk, would leave a module that no later process can
use ("There is no kernel named ..."), and unlike MLX's own folder ours outlives a restart of the machine.
"""

import logging
import os
from importlib.metadata import version
from pathlib import Path

from ...cache.files import atomic_write

log = logging.getLogger("mlxrt")

FOLDER = "MLX_PTX_CACHE_DIR"  # read by MLX when it needs its first module
PLACEHOLDER = b"mlxrt"  # launched in place of the code
WORD = (1 << 64) - 1
MULTIPLIER, SEED = 0xC6A4A7935BD1E995, 0xC70F6907


def use_module_folder(folder: Path, architecture: str) -> Path:
    """Where MLX keeps modules: where the user says, else in `folder`. To be called before MLX computes anything."""
    modules = Path(os.environ.setdefault(FOLDER, str(folder / f"modules-{version('mlx')}-{architecture}")))
    remove_unfinished(modules)
    return modules


def announce_compiling(folder: Path) -> None:
    """Say why first answers are late, where MLX has compiled nothing yet. Our own modules come without their source."""
    if not any(folder.rglob("*.cu")):
        log.info(
            "MLX compiles its CUDA kernels when they are first used, once for this machine: first prompts can take "
            f"minutes ({folder})"
        )


def remove_unfinished(folder: Path) -> None:
    """Have MLX compile anew what was cut off while it was written.

    A process that is writing one at this moment loses nothing: it has the module in memory, and without the .ptx the
    rest of it counts as not there.
    """
    removed = 0
    for code in folder.rglob("*.ptx"):
        if read_size(code) and read_size(code.with_suffix(".txt")) and read_size(code.with_suffix(".cu"), absent=1):
            continue
        try:
            code.unlink(missing_ok=True)
            removed += 1
        except OSError as error:
            log.warning(f"{code} was cut off and cannot be removed: {error.strerror or error}; MLX may fail with it")
    if removed:
        log.info(f"{removed} compiled modules in {folder} were cut off while they were written: MLX compiles them anew")


def read_size(file: Path, absent: int = 0) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return absent


def put_module(folder: Path, name: str, code: bytes) -> bytes:
    """Store a kernel under its name, which no other code has; what to launch it with. OSError if it cannot be."""
    path = folder / f"{name}_{hash_bytes(PLACEHOLDER):x}.ptx"
    if not path.exists() or path.stat().st_size != len(code):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for file, content in ((path.with_suffix(".txt"), f"{name}\t{name}\n".encode()), (path, code)):
            with atomic_write(file) as out:
                out.write(content)
    return PLACEHOLDER


def hash_bytes(data: bytes) -> int:
    """std::hash of a std::string, as GNU's library computes it on 64 bits."""
    h = SEED ^ (len(data) * MULTIPLIER & WORD)
    whole = len(data) & ~7
    for at in range(0, whole, 8):
        word = int.from_bytes(data[at : at + 8], "little") * MULTIPLIER & WORD
        h = ((h ^ (mix(word) * MULTIPLIER & WORD)) * MULTIPLIER) & WORD
    if whole < len(data):
        h = ((h ^ int.from_bytes(data[whole:], "little")) * MULTIPLIER) & WORD
    return mix(mix(h) * MULTIPLIER & WORD)


def mix(value: int) -> int:
    return value ^ (value >> 47)
