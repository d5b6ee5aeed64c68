"""Launches of our own kernels on CUDA, many at once and without MLX: what MLX's host side takes for each is saved.

As much of CUDA's driver as that needs, in the context MLX works in and on a stream of its own. Neither stream knows of
the other: whoever goes from one to the other waits for it.
"""

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from ..metal_source import read
from .nvrtc import Launch, Library, cuda_source

ADDRESS_BATCH = 64  # arrays that are asked for their addresses at once
RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: other threads go on with their own work
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
NUMBERS: dict[mx.Dtype, Any] = {mx.uint32: ctypes.c_uint32, mx.float32: ctypes.c_float}  # that the host reads
DISABLE_TIMING = 2  # CU_EVENT_DISABLE_TIMING
ADDRESSES, SIZES = ("to", "source"), ("width", "height", "to_pitch", "source_pitch")
COPY = np.dtype([(name, "u8") for name in ADDRESSES] + [(name, "u4") for name in SIZES])  # as copy_pieces.cu has it
COPY_THREADS = 256
PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_...
OVERLAPPING_GRAPHS = 12030  # the first CUDA whose graphs know of it


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: a number, and a union of 64 bytes."""

    _fields_ = [("id", ctypes.c_uint32), ("padding", ctypes.c_uint32), ("value", ctypes.c_uint32 * 16)]


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("blocks", ctypes.c_uint32 * 3),
        ("threads", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("num_attributes", ctypes.c_uint32),
    ]


# The device may place a kernel's threadgroups while the last ones of the kernel ahead of it end. Every kernel of ours
# waits for that one's results before it does anything (WAIT in nvrtc.py).
OVERLAPPED = LaunchAttribute(PROGRAMMATIC_STREAM_SERIALIZATION, 0, (ctypes.c_uint32 * 16)(1))


class Driver:
    def __init__(self, library: Library):
        if mx.default_device() != mx.Device(mx.gpu, 0):
            raise RuntimeError(f"MLX works on {mx.default_device()}, not on the first GPU")
        self._cuda, self._library = ctypes.CDLL("libcuda.so.1"), library
        self("cuInit", 0)
        device, self._context = ctypes.c_int(), ctypes.c_void_p()
        self("cuDeviceGet", ctypes.byref(device), 0)
        self("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self.enter()
        self.stream = ctypes.c_void_p()
        self("cuStreamCreate", ctypes.byref(self.stream), NON_BLOCKING)
        version = ctypes.c_int()
        self("cuDriverGetVersion", ctypes.byref(version))
        self._overlaps = version.value >= OVERLAPPING_GRAPHS and library.waits
        self._functions: dict[str, ctypes.c_void_p] = {}
        self._asks = library.find(asking(), "mlxrt_addresses")
        copying = library.find(read("cuda/copy_pieces.cu"), "mlxrt_copy_pieces")
        self._copies = Launch(*copying, [], [], (1, 1, 1), (COPY_THREADS, 1, 1))
        self._copy_table: Slot | None = None
        self._idle: list[Slot] = []
        self._staging: Slot | None = None

    def __call__(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._cuda, name)(*arguments):
            raise RuntimeError(f"{name}: CUDA error {code}")

    def enter(self) -> None:
        """On whatever thread this is."""
        self("cuCtxSetCurrent", self._context)

    def addresses(self, arrays: Sequence[mx.array]) -> list[int]:
        """Where they lie, asked of a kernel that MLX runs. All that MLX was asked to compute before has then been computed."""
        name, code = self._asks
        asked: list[mx.array] = []
        for i in range(0, len(arrays), ADDRESS_BATCH):
            some = list(arrays[i : i + ADDRESS_BATCH])
            asked += self._library.run(
                name=name, compiled_source=code, inputs=some + some[:1] * (ADDRESS_BATCH - len(some)),
                output_shapes=[(ADDRESS_BATCH, 2)], output_dtypes=[mx.uint32], scalars=[], grid=(1, 1, 1), threadgroup=(1, 1, 1), ensure_row_contiguous=True,
            )  # fmt: skip
        pairs: Any = mx.concatenate(asked).tolist()
        return [low | high << 32 for low, high in pairs[: len(arrays)]]

    def function(self, launch: Launch) -> ctypes.c_void_p:
        if launch.name not in self._functions:
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            self("cuModuleLoadData", ctypes.byref(module), launch.code)
            self("cuModuleGetFunction", ctypes.byref(function), module, launch.name.encode())
            self._functions[launch.name] = function
        return self._functions[launch.name]

    def graph(self, launches: Sequence[tuple[Launch, Sequence[int]]]) -> "Graph":
        """These, one after another, each with the addresses of its inputs and outputs."""
        self.enter()
        functions = [self.function(launch) for launch, _ in launches]
        graph, ready = ctypes.c_void_p(), ctypes.c_void_p()
        self("cuStreamBeginCapture_v2", self.stream, RELAXED)
        for n, (function, (launch, addresses)) in enumerate(zip(functions, launches)):
            values = (ctypes.c_uint64 * len(addresses))(*addresses)
            first = ctypes.addressof(values)
            pointers = (ctypes.c_void_p * len(addresses))(*(first + 8 * i for i in range(len(addresses))))
            config = LaunchConfig(launch.blocks, launch.threads, 0, self.stream, ctypes.pointer(OVERLAPPED))
            config.num_attributes = n > 0 and self._overlaps
            self("cuLaunchKernelEx", ctypes.pointer(config), function, pointers, None)
        self("cuStreamEndCapture", self.stream, ctypes.byref(graph))
        try:
            self("cuGraphInstantiateWithFlags", ctypes.byref(ready), graph, ctypes.c_uint64(0))
        finally:
            self("cuGraphDestroy", graph)
        return Graph(self, ready)

    def copy(self, to: int, source: int, nbytes: int) -> None:
        pointers = ctypes.c_uint64(to), ctypes.c_uint64(source)
        self("cuMemcpyDtoDAsync_v2", *pointers, ctypes.c_size_t(nbytes), self.stream)

    def copy_pieces(self, copies: np.ndarray) -> None:
        """Rectangles of bytes [pieces] of COPY, all in one launch: each by itself would take the device a microsecond.
        The kernel reads them in the host's memory, so the ones before must have been copied: this waits for those."""
        table = self._copy_table
        if table is None or table.size < copies.nbytes:
            self._free(table)
            table = self._copy_table = Slot(self, 2 * copies.nbytes)
        self("cuEventSynchronize", table.event)
        ctypes.memmove(table.host, copies.ctypes.data, copies.nbytes)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(table.host))
        blocks, threads = (len(copies), 1, 1), self._copies.threads
        self("cuLaunchKernel", self.function(self._copies), *blocks, *threads, 0, self.stream, pointers, None)
        self("cuEventRecord", table.event, self.stream)

    def upload(self, copies: Sequence[tuple[int, np.ndarray]]) -> None:
        """Numbers of the host to where they are wanted. There is one staging buffer: this waits until what was uploaded
        before has left it."""
        size = sum(numbers.nbytes for _, numbers in copies)
        staging = self._staging
        if staging is None or staging.size < size:
            self._free(staging)
            staging = self._staging = Slot(self, 2 * size)
        self("cuEventSynchronize", staging.event)
        at = staging.host.value or 0
        for to, numbers in copies:
            ctypes.memmove(at, np.ascontiguousarray(numbers).ctypes.data, numbers.nbytes)
            given = ctypes.c_uint64(to), ctypes.c_void_p(at), ctypes.c_size_t(numbers.nbytes)
            self("cuMemcpyHtoDAsync_v2", *given, self.stream)
            at += numbers.nbytes
        self("cuEventRecord", staging.event, self.stream)

    def fetch(self, address: int, shape: tuple[int, ...], dtype: mx.Dtype) -> "Fetched":
        """Rows of uint32 or float32 numbers, as they will be when what was launched before is done."""
        nbytes = 4 * shape[0] * shape[1]
        fits = next((slot for slot in self._idle if slot.size >= nbytes), None)
        if fits is not None:
            self._idle.remove(fits)
        slot = fits or Slot(self, nbytes)
        self("cuMemcpyDtoHAsync_v2", slot.host, ctypes.c_uint64(address), ctypes.c_size_t(nbytes), self.stream)
        self("cuEventRecord", slot.event, self.stream)
        return Fetched(self, slot, shape, NUMBERS[dtype])

    def give_back(self, slot: "Slot") -> None:
        self._idle.append(slot)

    def wait(self) -> None:
        self.enter()
        self("cuStreamSynchronize", self.stream)

    def close(self) -> None:
        """When nothing is running any more."""
        for slot in (*self._idle, self._staging, self._copy_table):
            self._free(slot)
        self._idle.clear()
        self._staging = self._copy_table = None
        self("cuStreamDestroy_v2", self.stream)

    def _free(self, slot: "Slot | None") -> None:
        if slot is not None:
            self.wait()  # the device may be using it
            self("cuMemFreeHost", slot.host)
            self("cuEventDestroy_v2", slot.event)


class Graph:
    """Ready to be launched, as often as one likes: the next waits for the one before."""

    def __init__(self, driver: Driver, ready: ctypes.c_void_p):
        self._driver, self._ready = driver, ready
        weakref.finalize(self, driver, "cuGraphExecDestroy", ready).atexit = False  # a process that ends frees it all

    def launch(self) -> None:
        self._driver("cuGraphLaunch", self._ready, self._driver.stream)


class Slot:
    """Memory of the host that the device writes, and when it has."""

    def __init__(self, driver: Driver, size: int):
        self.size, self.host, self.event = size, ctypes.c_void_p(), ctypes.c_void_p()
        driver("cuMemAllocHost_v2", ctypes.byref(self.host), ctypes.c_size_t(size))
        driver("cuEventCreate", ctypes.byref(self.event), DISABLE_TIMING)


class Fetched:
    """Rows of numbers on their way to the host; read once."""

    def __init__(self, driver: Driver, slot: Slot, shape: tuple[int, ...], kind: Any):
        self._driver, self._slot, self._shape, self._kind = driver, slot, shape, kind

    def tolist(self) -> list[list[Any]]:
        """Waits."""
        rows, width = self._shape
        self._driver.enter()
        self._driver("cuEventSynchronize", self._slot.event)
        numbers = (self._kind * (rows * width)).from_address(self._slot.host.value or 0)
        read = [list(numbers[i * width : (i + 1) * width]) for i in range(rows)]
        self._driver.give_back(self._slot)
        return read


def asking() -> str:
    """The text of a kernel that answers where its inputs lie, whatever they are."""
    names = [f"a{i}" for i in range(ADDRESS_BATCH)]
    lines = [
        f"out[{2 * i}] = (unsigned int)(size_t){n}; out[{2 * i + 1}] = (size_t){n} >> 32;" for i, n in enumerate(names)
    ]
    return cuda_source("NAME", [(n, mx.uint8) for n in names], [("out", mx.uint32)], "\n".join(lines), "", [], 1)
