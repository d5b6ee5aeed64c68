"""What the machine is, and what else it does while we measure. Knows no engine."""

import os
import platform
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

BUSY_LOAD = 0.5  # of other processes, before we start
LIBRARIES = ("mlx", "mlx-lm", "xllamacpp", "numpy", "transformers", "tokenizers")


@dataclass(frozen=True)
class Bustle:
    """What else the machine does."""

    load: float  # cores that others keep busy
    cores: int
    share: float  # of a core that a busy loop got

    @property
    def busy(self) -> bool:
        return self.load > BUSY_LOAD or self.share < 0.95

    def __str__(self) -> str:
        state = "BUSY: figures are noisy" if self.busy else "quiet"
        return f"others use {self.load:.2f} of {self.cores} cores, a loop gets {self.share:.0%} of a core ({state})"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"busy": self.busy}


def look_around(seconds: float = 1.0) -> Bustle:
    """Spin for a moment and see how much of it was granted, and how many cores others kept busy meanwhile."""
    others = busy_seconds()
    wall, used = time.perf_counter(), time.process_time()
    while time.perf_counter() - wall < seconds:
        sum(range(1000))
    wall, used = time.perf_counter() - wall, time.process_time() - used
    if others is None or (now := busy_seconds()) is None:
        load = os.getloadavg()[0]  # of the last minute: what ended just now still counts
    else:
        load = max(0.0, (now - others - used) / wall)
    return Bustle(load, os.cpu_count() or 1, min(used / wall, 1.0))


def busy_seconds() -> float | None:
    """What all cores together have worked since the machine started; None where the system does not say."""
    try:
        user, nice, system, _idle, _waiting, *more = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        return sum(map(int, (user, nice, system, *more))) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return None


def swapped() -> int | None:
    """Pages read back from or written to swap since the machine started; None where the system does not say."""
    if sys.platform.startswith("linux"):
        try:
            found = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
            return int(found["pswpin"]) + int(found["pswpout"])
        except (OSError, KeyError):
            return None
    if sys.platform == "darwin":
        told = subprocess.run(["vm_stat"], capture_output=True, text=True, check=False).stdout
        return sum(int(n) for n in re.findall(r"Swap(?:ins|outs):\s+(\d+)", told))
    return None


def describe() -> dict[str, Any]:
    """Everything about this machine that a figure may depend on, but its device: the engine's process knows that."""
    return {
        "name": f"{platform.system().lower()}-{platform.machine()}-{os.cpu_count()}",
        "host": platform.node(),
        "system": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "libraries": {name: found for name in LIBRARIES if (found := installed(name))},
    }


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def processor() -> str:
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    try:
        told = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    found = re.search(r"^(?:model name|Hardware)\s*:\s*(.+)$", told, re.M)
    return found[1] if found else platform.processor() or platform.machine()


def library(told: str) -> str:
    """What a library says of itself, its file without the folder: reports are shown to others."""
    return re.sub(r"\(/.*/", "(", told)
