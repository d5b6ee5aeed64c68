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

    load: float  # processes that want a core, last minute
    cores: int
    share: float  # of a core that a busy loop got

    @property
    def busy(self) -> bool:
        return self.load > BUSY_LOAD or self.share < 0.95

    def __str__(self) -> str:
        state = "BUSY: figures are noisy" if self.busy else "quiet"
        return f"load {self.load:.2f} on {self.cores} cores, a loop gets {self.share:.0%} of a core ({state})"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"busy": self.busy}


def look_around(seconds: float = 1.0) -> Bustle:
    """Spin for a moment and see how much of it was granted."""
    load = os.getloadavg()[0]
    wall, used = time.perf_counter(), time.process_time()
    while time.perf_counter() - wall < seconds:
        sum(range(1000))
    share = (time.process_time() - used) / (time.perf_counter() - wall)
    return Bustle(load, os.cpu_count() or 1, min(share, 1.0))


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
