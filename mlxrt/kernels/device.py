"""The device MLX runs on: its backend, its memory, and the profile that launch shapes are chosen by."""

import ctypes
import logging
import os
import sys
from dataclasses import dataclass

import mlx.core as mx

log = logging.getLogger("mlxrt")

TUNED_CORES = 132  # of the H200 that launch shapes were measured on
MIN_THREADGROUP_MEMORY = 32768  # bytes that every GPU has
CUDA_SHARED_MEMORY = 49152  # bytes that every CUDA device gives a block
# Cores by the last letter of Apple's architecture, "applegpu_g13s": phones, base and Pro chips, Max, Ultra.
APPLE_CORES = {"p": 6, "g": 10, "s": 40, "d": 80}
MULTIPROCESSOR_COUNT = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
DRIVER_MEMORY = 256 << 20  # that CUDA takes itself, for kernels and graphs: without it a launch fails
IDLE_CACHE = 16 << 20  # bytes of MLX's buffers that an idle process keeps on a CPU
SHARED_MEMORY = 8  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK


@dataclass(frozen=True)
class DeviceProfile:
    """What launch shapes depend on. The default is the device they were tuned on."""

    cores: int = TUNED_CORES
    threadgroup_memory: int = MIN_THREADGROUP_MEMORY

    def scale(self, threadgroups: int) -> int:
        """As many threadgroups for each core as `threadgroups` are on the device that was measured."""
        return max(1, round(threadgroups * self.cores / TUNED_CORES))


def backend() -> str:
    """cpu, metal or cuda."""
    if mx.default_device() == mx.Device(mx.cpu):
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def architecture() -> str:
    """The GPU's, such as sm_90 or applegpu_g13s."""
    return str(mx.device_info().get("architecture", ""))


def profile(name: str) -> DeviceProfile:
    """Of this machine where `name` is its backend; where kernels are only simulated, of the device that was measured."""
    if name == "cuda":
        found = cuda_attributes() if backend() == "cuda" else None
        return DeviceProfile(*(found or (TUNED_CORES, CUDA_SHARED_MEMORY)))
    if backend() != name:
        return DeviceProfile()
    if (letter := architecture()[-1:]) not in APPLE_CORES:
        log.warning(f"GPU architecture {architecture()!r} is unknown: launch shapes are for {TUNED_CORES} cores")
    return DeviceProfile(APPLE_CORES.get(letter, TUNED_CORES))


def cuda_attributes() -> tuple[int, int] | None:
    """Multiprocessors, and bytes of shared memory that a block has without asking for more; None, logged, if unknown."""
    device, found = ctypes.c_int(), []
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        failed = cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0)
        for attribute in (MULTIPROCESSOR_COUNT, SHARED_MEMORY):
            value = ctypes.c_int()
            failed = failed or cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
            found.append(value.value)
        reason = f"CUDA error {failed}" if failed else ""
    except OSError as error:
        reason = str(error)
    if reason:
        log.warning(
            f"CUDA's driver does not tell the device's size ({reason}): launch shapes are for {TUNED_CORES} cores"
        )
        return None
    return found[0], found[1]


def memory() -> tuple[int, int]:
    """Bytes a process should take in all, and bytes that are free now, with those that MLX keeps to use again."""
    info = mx.device_info()
    if backend() == "metal":
        limit = int(info["max_recommended_working_set_size"])
        return limit, max(limit - mx.get_active_memory(), 0)
    if backend() == "cuda":
        total = int(info.get("total_memory", info.get("memory_size", 0)))
        if "free_memory" not in info:
            return total, max(total - mx.get_active_memory(), 0)
        free = min(total, int(info["free_memory"]) + mx.get_cache_memory())
        return total, max(0, free - DRIVER_MEMORY)
    total, free = host_memory()
    return total, min(total, free + mx.get_cache_memory())


def limit_mlx(most: int, free: int, spare: int = 0) -> None:
    """Let MLX hold what it holds and the `free` bytes of `memory()`, `spare` less, and `most` at most. Beyond its limit it
    gives buffers back and waits; what other programs have taken it does not see, and would run out of memory."""
    mx.set_memory_limit(min(most, mx.get_active_memory() + max(free - spare, 0)))


def release_idle_cache() -> None:
    """On a CPU, whose memory belongs to other programs too, keep little of what a prompt took when nothing runs."""
    if backend() == "cpu" and mx.get_cache_memory() > IDLE_CACHE:
        release_cache()


def release_cache() -> None:
    """Give back to the device what MLX keeps to use again; other programs may need it, or an array of another size."""
    mx.clear_cache()
    mx.synchronize()  # CUDA's own pool gives memory back when nothing is running
    if backend() == "cpu" and sys.platform.startswith("linux") and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)  # glibc keeps it otherwise: after loading a model, half as much as the model takes


def host_memory() -> tuple[int, int]:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/proc/meminfo") as lines:
            found = dict(line.split(":", 1) for line in lines)
        return total, int(found["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return total, total // 2  # no /proc (macOS): the kernel does not say, half is safe
