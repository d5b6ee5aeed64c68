"""Launches of our own kernels on CUDA, many at once and without MLX: what MLX's host side takes for each is saved.

As much of CUDA's driver as that needs, in the context MLX works in and on a stream of its own. Neither stream knows of
the other: whoever goes from one to the other waits for it.

Every kernel is launched as part of a graph, and every copy is made by one of our kernels. Once a process has launched
about eight kernels by themselves, also by a copy that the driver makes with one, each kernel of its graphs takes 0.35 us
more for the rest of its life (docs/decisions/0033).
"""

import ctypes
import weakref
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ..metal_source import read
from .nvrtc import WAIT, Launch, Library, cuda_source

ADDRESS_BATCH = 64  # arrays that are asked for their addresses at once
RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: other threads go on with their own work
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
NUMBERS: dict[mx.Dtype, Any] = {mx.uint32: ctypes.c_uint32, mx.float32: ctypes.c_float}  # that the host reads
DISABLE_TIMING = 2  # CU_EVENT_DISABLE_TIMING
ADDRESSES, SIZES = ("to", "source"), ("width", "height", "to_pitch", "source_pitch")
COPY = np.dtype([(name, "u8") for name in ADDRESSES] + [(name, "u4") for name in SIZES])  # as copy_pieces.cu has it
COPY_GRID, COPY_THREADS = (256, 1, 1), (256, 1, 1)
MAX_COPIES = 4096  # in one launch
PIECE = 1 << 16  # bytes that one threadgroup copies
UPLOAD_PIECE = 1 << 12  # or reads from the host's memory, which takes it microseconds
NUM_STAGING = 4  # buffers of the host that the device may still have to read
MAX_STEP_COPIES = 32  # as step_copies.cu has it
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


class StepCopy(ctypes.Structure):
    """Words of 32 bits: those of this step of several that lie one after another, or the only ones."""

    _fields_ = [("to", ctypes.c_uint64), ("source", ctypes.c_uint64), ("words", ctypes.c_uint64)]


class StepCopies(ctypes.Structure):
    """What step_copies.cu takes: the number of the step, or nothing, and what is copied."""

    _fields_ = [("step", ctypes.c_uint64), ("count", ctypes.c_uint64), ("copies", StepCopy * MAX_STEP_COPIES)]


class Result(NamedTuple):
    """Rows of numbers that the host reads after every launch of a graph."""

    address: int
    shape: tuple[int, int]
    dtype: mx.Dtype

    @property
    def nbytes(self) -> int:
        return 4 * self.shape[0] * self.shape[1]


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
        pieces = library.find(read("cuda/copy_pieces.cu"), "mlxrt_copy_pieces")
        self._copy_pieces = Launch(*pieces, [], [], COPY_GRID, COPY_THREADS)
        steps = library.find(read("cuda/step_copies.cu").replace("WAIT", WAIT), "mlxrt_step_copies")
        self._step_copies = Launch(*steps, [], [], (1, 1, 1), COPY_THREADS)
        self._tables: deque[tuple[Slot, Graph]] = deque()  # what copy_pieces reads
        self._uploads: deque[Slot] = deque()

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

    def graph(
        self,
        launches: Sequence[tuple[Launch, Sequence[int]]],
        step: int = 0,
        copies: Sequence[tuple[int, int, int]] = (),
        results: Sequence[Result] = (),
    ) -> "Graph":
        """These, one after another, each with the addresses of its inputs and outputs.

        Before them `copies`, whose (to, source, bytes) are those of the step whose number lies at `step`: the first
        lies at source, the next one after it. That number is one higher for the next launch. After them `results`
        are copied to the host.
        """
        self.enter()
        given = [(launch, pack_addresses(addresses)) for launch, addresses in launches]
        if copies:
            given.insert(0, (self._step_copies, pack_copies(step, copies)))
        slot = None
        if results:
            slot = Slot(self, sum(result.nbytes for result in results))
            kept = [(to, result.address, result.nbytes) for to, result in place_results(slot, results)]
            given.append((self._step_copies, pack_copies(0, kept)))
        functions = [self.function(launch) for launch, _ in given]
        graph, ready = ctypes.c_void_p(), ctypes.c_void_p()
        self("cuStreamBeginCapture_v2", self.stream, RELAXED)
        for n, (function, (launch, arguments)) in enumerate(zip(functions, given)):
            config = LaunchConfig(launch.blocks, launch.threads, 0, self.stream, ctypes.pointer(OVERLAPPED))
            config.num_attributes = n > 0 and self._overlaps
            pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
            self("cuLaunchKernelEx", ctypes.pointer(config), function, pointers, None)
        self("cuStreamEndCapture", self.stream, ctypes.byref(graph))
        try:
            self("cuGraphInstantiateWithFlags", ctypes.byref(ready), graph, ctypes.c_uint64(0))
        finally:
            self("cuGraphDestroy", graph)
        return Graph(self, ready, slot, results)

    def copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """(to, source, bytes) of each."""
        self.copy_pieces(np.concatenate([cut_copy(*copy) for copy in copies]))

    def copy_pieces(self, copies: np.ndarray) -> None:
        """Rectangles of bytes [pieces] of COPY, thousands in one launch: each by itself would take the device a
        microsecond. The kernel reads the table in the host's memory."""
        for first in range(0, len(copies), MAX_COPIES):
            some = copies[first : first + MAX_COPIES]
            table, graph = self._next_table()
            count = np.zeros(1, COPY)
            count["to"] = len(some)
            at = table.host.value or 0
            ctypes.memmove(at, count.ctypes.data, COPY.itemsize)
            ctypes.memmove(at + COPY.itemsize, np.ascontiguousarray(some).ctypes.data, some.nbytes)
            graph.launch()
            table.record()

    def _next_table(self) -> "tuple[Slot, Graph]":
        """One that the device need not read any more."""
        if len(self._tables) < NUM_STAGING:
            slot = Slot(self, (1 + MAX_COPIES) * COPY.itemsize)
            self._tables.append((slot, self.graph([(self._copy_pieces, [slot.host.value or 0])])))
        else:
            self._tables.rotate(-1)
        slot, graph = self._tables[-1]
        slot.wait()
        return slot, graph

    def upload(self, copies: Sequence[tuple[int, np.ndarray]]) -> None:
        """Numbers of the host to where they are wanted: by a kernel, as MLX's memory may be managed by the driver."""
        staging = self._next_upload(sum(align(numbers.nbytes) for _, numbers in copies))
        at, pieces = staging.host.value or 0, []
        for to, numbers in copies:
            ctypes.memmove(at, np.ascontiguousarray(numbers).ctypes.data, numbers.nbytes)
            pieces.append(cut_copy(to, at, numbers.nbytes, UPLOAD_PIECE))
            at += align(numbers.nbytes)
        self.copy_pieces(np.concatenate(pieces))
        staging.record()

    def _next_upload(self, nbytes: int) -> "Slot":
        """So much room that the device need not read any more."""
        slot = self._uploads.popleft() if len(self._uploads) == NUM_STAGING else None
        if slot is not None:
            slot.wait()
        if slot is None or slot.size < nbytes:
            slot = Slot(self, 2 * nbytes)
        self._uploads.append(slot)
        return slot

    def fetch(self, results: Sequence[Result]) -> "list[Fetched]":
        """As they will be when what was launched before is done."""
        slot = Slot(self, sum(result.nbytes for result in results))
        placed = place_results(slot, results)
        self.copy([(at, result.address, result.nbytes) for at, result in placed])
        slot.record()
        return [Fetched(slot, at, result) for at, result in placed]

    def wait(self) -> None:
        self.enter()
        self("cuStreamSynchronize", self.stream)

    def release(self, name: str, what: ctypes.c_void_p) -> None:
        """On whatever thread it is found out that nobody needs it."""
        self.enter()
        self(name, what)

    def close(self) -> None:
        """When nothing is running any more."""
        self._tables.clear()
        self._uploads.clear()
        self("cuStreamDestroy_v2", self.stream)


class Graph:
    """Ready to be launched, as often as one likes: the next waits for the one before."""

    def __init__(
        self, driver: Driver, ready: ctypes.c_void_p, slot: "Slot | None" = None, results: Sequence[Result] = ()
    ):
        self._driver, self._ready = driver, ready
        self._slot, self._results = slot, results
        self._fetched: list[Fetched] = []
        weakref.finalize(self, driver.release, "cuGraphExecDestroy", ready).atexit = False

    def launch(self) -> "list[Fetched]":
        """Its results, as they will be."""
        for fetched in self._fetched:
            fetched.read()  # before they are overwritten
        self._driver("cuGraphLaunch", self._ready, self._driver.stream)
        if self._slot is not None:
            self._slot.record()
            self._fetched = [Fetched(self._slot, at, result) for at, result in place_results(self._slot, self._results)]
        return self._fetched


class Slot:
    """Memory of the host that the device reads or writes, and when it has."""

    def __init__(self, driver: Driver, size: int):
        self.size, self.host, self._event, self._driver = size, ctypes.c_void_p(), ctypes.c_void_p(), driver
        driver("cuMemAllocHost_v2", ctypes.byref(self.host), ctypes.c_size_t(size))
        driver("cuEventCreate", ctypes.byref(self._event), DISABLE_TIMING)
        weakref.finalize(self, driver.release, "cuMemFreeHost", self.host).atexit = False
        weakref.finalize(self, driver.release, "cuEventDestroy_v2", self._event).atexit = False

    def record(self) -> None:
        """What was launched until now is the last to use it."""
        self._driver("cuEventRecord", self._event, self._driver.stream)

    def wait(self) -> None:
        self._driver.enter()
        self._driver("cuEventSynchronize", self._event)


class Fetched:
    """Rows of numbers on their way to the host."""

    def __init__(self, slot: Slot, at: int, result: Result):
        self.at = at
        self._slot, self._shape, self._kind = slot, result.shape, NUMBERS[result.dtype]
        self._numbers: list[list[Any]] | None = None

    def read(self) -> None:
        """Waits."""
        if self._numbers is None:
            self._slot.wait()
            rows, width = self._shape
            numbers = (self._kind * (rows * width)).from_address(self.at)
            self._numbers = [list(numbers[i * width : (i + 1) * width]) for i in range(rows)]

    def tolist(self) -> list[list[Any]]:
        """Waits."""
        self.read()
        return self._numbers or []


def place_results(slot: Slot, results: Sequence[Result]) -> list[tuple[int, Result]]:
    """One after another."""
    return list(zip(accumulate((result.nbytes for result in results), initial=slot.host.value or 0), results))


def pack_addresses(addresses: Sequence[int]) -> list[Any]:
    """A kernel's arguments."""
    return [ctypes.c_uint64(address) for address in addresses]


def pack_copies(step: int, copies: Sequence[tuple[int, int, int]]) -> list[Any]:
    """The argument of step_copies.cu. `copies`: (to, source, bytes)."""
    packed = [StepCopy(to, source, nbytes // 4) for to, source, nbytes in copies]
    return [StepCopies(step, len(packed), (StepCopy * MAX_STEP_COPIES)(*packed))]


def cut_copy(to: int, source: int, nbytes: int, piece: int = PIECE) -> np.ndarray:
    """Bytes that lie together, in pieces of one threadgroup each."""
    starts = np.arange(0, nbytes, piece, dtype=np.uint64)
    copies = np.zeros(len(starts), COPY)
    copies["to"], copies["source"] = to + starts, source + starts
    copies["width"], copies["height"] = np.minimum(nbytes - starts, piece), 1
    return copies


def align(nbytes: int) -> int:
    """Up to the next number of bytes that copies go by."""
    return -(-nbytes // 16) * 16


def asking() -> str:
    """The text of a kernel that answers where its inputs lie, whatever they are."""
    names = [f"a{i}" for i in range(ADDRESS_BATCH)]
    lines = [
        f"out[{2 * i}] = (unsigned int)(size_t){n}; out[{2 * i + 1}] = (size_t){n} >> 32;" for i, n in enumerate(names)
    ]
    return cuda_source("NAME", [(n, mx.uint8) for n in names], [("out", mx.uint32)], "\n".join(lines), "", [], 1)
