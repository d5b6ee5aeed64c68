"""The native runtime as Python sees it: buffers, one run, what it found. Knows no Metal text and no MLX call."""

import ctypes
import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .findings import Finding
from .toolchain import runtime_library, source_line
from .translate import ENTRYPOINT, FILE

ASCENDING, DESCENDING, SHUFFLED = 0, 1, 2
INPUT, OUTPUT, CONSTANT = 0, 1, 2
COUNTS = "threads threadgroups switches simd_ops barriers accesses partial_simd threadgroup_bytes".split()


class Stats(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in COUNTS)


@functools.cache
def native() -> ctypes.CDLL:
    library = ctypes.CDLL(str(runtime_library()), mode=ctypes.RTLD_GLOBAL)  # kernels find the callbacks in it
    library.msim_buffer.restype = ctypes.c_void_p
    library.msim_buffer.argtypes = (ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint, ctypes.c_uint, ctypes.c_int)
    library.msim_unwritten.restype = ctypes.c_size_t
    library.msim_finding.restype = ctypes.c_char_p
    return library


ONE_AT_A_TIME = threading.Lock()  # the runtime's state is the process's


class Machine:
    """Memory and threads for one run."""

    def __init__(self, checked: bool):
        self.native = native()
        self.checked = checked
        self.regions = 0
        self.pointers: list[int] = []
        self.native.msim_reset()

    def buffer(self, name: str, raw: bytes, element: int, kind: int, offset: int = 0) -> int:
        """A read-only buffer holding `raw`; the kernel gets its address moved by `offset` bytes."""
        place = self._region(name, len(raw), element, kind)
        ctypes.memmove(place, raw, len(raw))
        self.pointers.append(place + offset)
        return place

    def output(self, name: str, size: int, element: int, value: bytes | None) -> tuple[int, int]:
        """Address and region of a buffer to be written; without a value it holds 0xff bytes, and reading is found."""
        region = self.regions
        place = self._region(name, size, element, OUTPUT)
        if value is None:
            ctypes.memset(place, 0xFF, size)
        else:
            ctypes.memmove(place, value, size)
            self.native.msim_mark_written(region)
        self.pointers.append(place)
        return place, region

    def _region(self, name: str, size: int, element: int, kind: int) -> int:
        self.regions += 1
        return self.native.msim_buffer(name.encode(), size, element, kind, int(self.checked and kind == OUTPUT))

    def unwritten(self, region: int) -> tuple[int, int]:
        first = ctypes.c_size_t()
        return self.native.msim_unwritten(region, ctypes.byref(first)), first.value

    def run(self, library: Path, grid, threadgroup, order: int, seed: int, seconds: int) -> dict[str, int]:
        function = ctypes.CDLL(str(library))[ENTRYPOINT]
        triple, stats = ctypes.c_uint * 3, Stats()
        pointers = (ctypes.c_void_p * max(len(self.pointers), 1))(*self.pointers)
        self.native.msim_run(
            function,
            pointers,
            len(self.pointers),
            triple(*grid),
            triple(*threadgroup),
            int(self.checked),
            order,
            seed,
            seconds,
            ctypes.byref(stats),
        )
        return {name: getattr(stats, name) for name in COUNTS}

    def findings(self, library: Path) -> list[Finding]:
        found = []
        for i in range(self.native.msim_finding_count()):
            offset, count = ctypes.c_uint64(), ctypes.c_uint64()
            told = self.native.msim_finding(i, ctypes.byref(offset), ctypes.byref(count)).decode()
            kind, text = told.split("\t", 1)
            found.append(Finding(kind, text, source_line(library, offset.value, FILE), count.value))
        return found


@contextmanager
def machine(checked: bool) -> Iterator[Machine]:
    with ONE_AT_A_TIME:
        yield Machine(checked)
