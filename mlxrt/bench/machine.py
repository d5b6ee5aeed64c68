"""The machine a benchmark runs on, and its load by other processes. Knows no engine."""

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

BUSY_LOAD = 0.5  # cores that other processes use before a run
LIBRARIES = ("mlx", "mlx-lm", "xllamacpp", "numpy", "transformers", "tokenizers")


@dataclass(frozen=True)
class SystemLoad:
    """Load by other processes."""

    load: float  # cores that other processes keep busy
    cores: int
    share: float  # of a core that a busy loop gets

    @property
    def busy(self) -> bool:
        return self.load > BUSY_LOAD or self.share < 0.95

    def __str__(self) -> str:
        state = "BUSY: figures are noisy" if self.busy else "quiet"
        used = f"other processes use {self.load:.2f} of {self.cores} cores"
        return f"{used}, a busy loop gets {self.share:.0%} of a core ({state})"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"busy": self.busy}


def measure_load(seconds: float = 1.0) -> SystemLoad:
    """Spin for a moment: how much of a core a busy loop gets, and how many cores other processes use."""
    before = busy_seconds()
    wall, used = time.perf_counter(), time.process_time()
    while time.perf_counter() - wall < seconds:
        sum(range(1000))
    wall, used = time.perf_counter() - wall, time.process_time() - used
    if before is None or (now := busy_seconds()) is None:
        load = os.getloadavg()[0]  # of the last minute: processes that just ended still count
    else:
        load = max(0.0, (now - before - used) / wall)
    return SystemLoad(load, os.cpu_count() or 1, min(used / wall, 1.0))


def busy_seconds() -> float | None:
    """CPU seconds of all cores since boot; None where the system does not report it."""
    try:
        user, nice, system, _idle, _waiting, *more = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        return sum(map(int, (user, nice, system, *more))) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return None


def swapped_pages() -> int | None:
    """Pages swapped in and out since boot; None where the system does not report it."""
    if sys.platform.startswith("linux"):
        try:
            counters = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
            return int(counters["pswpin"]) + int(counters["pswpout"])
        except (OSError, KeyError):
            return None
    if sys.platform == "darwin":
        output = subprocess.run(["vm_stat"], capture_output=True, text=True, check=False).stdout
        return sum(int(n) for n in re.findall(r"Swap(?:ins|outs):\s+(\d+)", output))
    return None


def describe() -> dict[str, Any]:
    """What a figure may depend on, except the device: the engine's process knows that."""
    return {
        "name": f"{platform.system().lower()}-{platform.machine()}-{os.cpu_count()}",
        "host": platform.node(),
        "system": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "libraries": {name: found for name in LIBRARIES if (found := installed_version(name))},
    }


def installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def processor() -> str:
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    found = re.search(r"^(?:model name|Hardware)\s*:\s*(.+)$", cpuinfo, re.M)
    return found[1] if found else platform.processor() or platform.machine()


def library_name(text: str) -> str:
    """A library's description with its file but without the folder: reports are shared."""
    return re.sub(r"\(/.*/", "(", text)
