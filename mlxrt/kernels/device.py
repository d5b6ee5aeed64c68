"""What the machine has: which device MLX runs on and how much memory it may take."""

import os

import mlx.core as mx


def kind() -> str:
    """cpu, metal or cuda."""
    if mx.default_device() == mx.Device(mx.cpu):
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def memory() -> tuple[int, int]:
    """Bytes a process should take in all, and bytes that are free now."""
    info = mx.device_info()
    if kind() == "metal":
        limit = int(info["max_recommended_working_set_size"])
        return limit, max(limit - mx.get_active_memory(), 0)
    if kind() == "cuda":
        total = int(info.get("total_memory", info.get("memory_size", 0)))
        return total, int(info.get("free_memory", max(total - mx.get_active_memory(), 0)))
    return host_memory()


def host_memory() -> tuple[int, int]:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/proc/meminfo") as lines:
            found = dict(line.split(":", 1) for line in lines)
        return total, int(found["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return total, total // 2  # no /proc (macOS): the kernel does not say, half is safe
