"""What CUDA's driver is told of a graph's kernels, on a machine without one."""

import ctypes
from collections import deque
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlxrt.kernels.cuda.graph import (
    COPY,
    MAX_COPIES,
    PIECE,
    PROGRAMMATIC_STREAM_SERIALIZATION,
    Driver,
    Result,
    StepCopies,
    cut_copy,
)
from mlxrt.kernels.cuda.nvrtc import WAIT, Launch, Library, cuda_source


class RecordingDriver(Driver):
    """Notes what it is to launch, and what it launches outside of a graph. Its device is never behind."""

    def __init__(self, overlaps):
        self.stream, self._overlaps, self.launches = ctypes.c_void_p(7), overlaps, []
        self._tables, self._uploads = deque(), deque()
        self._copy_pieces, self._step_copies = (
            Launch(n, b"", [], [], (1, 1, 1), (256, 1, 1)) for n in ("pieces", "steps")
        )
        self.called, self.memory, self.given, self._captures = [], [], [], False

    def __call__(self, name, *arguments):
        if name == "cuMemAllocHost_v2":
            self.memory.append(ctypes.create_string_buffer(arguments[1].value))
            ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_void_p))[0] = ctypes.addressof(self.memory[-1])
        if name == "cuLaunchKernelEx":
            assert self._captures
            config = arguments[0].contents
            told = [config.attributes[i] for i in range(config.num_attributes)]
            attributes = [(attribute.id, attribute.value[0]) for attribute in told]
            self.launches.append((list(config.blocks), list(config.threads), config.stream, attributes))
            first = ctypes.cast(arguments[2], ctypes.POINTER(ctypes.c_void_p))[0]
            self.given.append(first if arguments[1].value != COPIES else read_copies(first))
        self._captures = (self._captures or name == "cuStreamBeginCapture_v2") and name != "cuStreamEndCapture"
        self.called.append(name)

    def enter(self):
        pass

    def function(self, launch):
        return ctypes.c_void_p(COPIES if launch is self._step_copies else 1)


COPIES = 2  # the function that takes them


def read_copies(at):
    given = StepCopies.from_address(at)
    return given.step, [(one.to, one.source, one.words) for one in given.copies[: given.count]]


@pytest.mark.parametrize("overlaps", [True, False])
def test_all_kernels_but_the_first_may_be_placed_early(overlaps):
    driver = RecordingDriver(overlaps)
    launches = [Launch("k", b"", [], [], (n, 2, 1), (32 * n, 1, 1)) for n in (1, 2, 3)]
    driver.graph([(launch, [4096, 8192]) for launch in launches])
    early = [(PROGRAMMATIC_STREAM_SERIALIZATION, 1)] if overlaps else []
    assert driver.launches == [([n, 2, 1], [32 * n, 1, 1], 7, early if n > 1 else []) for n in (1, 2, 3)]


@pytest.mark.parametrize(
    "architecture, waits", [("sm_75", False), ("sm_89", False), ("sm_90", True), ("sm_90a", True), ("sm_120", True)]
)
def test_kernels_wait_from_hopper_on(architecture, waits):
    assert Library(Path("."), architecture).waits is waits


def test_a_kernel_waits_before_it_reads_anything():
    text = cuda_source("k", [("x", mx.float32)], [("y", mx.float32)], "y[0] = x[0];", "", [("N", 3)], 32)
    assert "x[0]" in text.split(WAIT)[1] and "x[" not in text.split(WAIT)[0]


def test_kernels_are_launched_in_graphs_only():
    """Neither by themselves nor by a copy that the driver makes with one: graphs would be slower from then on."""
    driver = RecordingDriver(True)
    graph = driver.graph([(Launch("k", b"", [], [], (1, 1, 1), (32, 1, 1)), [4096])], 64, [(128, 256, 8)])
    for _ in range(9):
        graph.launch()
        driver.copy([(1 << 20, 1 << 30, 3 * PIECE)])
        driver.copy_pieces(np.zeros(2 * MAX_COPIES + 1, COPY))
        driver.upload([(4096, np.arange(9))])
        driver.fetch([Result(4096, (2, 2), mx.uint32)])
    launching = {name for name in driver.called if name.startswith(("cuLaunch", "cuMemcpy", "cuMemset"))}
    captures = driver.called.count("cuStreamBeginCapture_v2")
    assert launching == {"cuLaunchKernelEx"} and driver.called.count("cuLaunchKernelEx") == 1 + captures
    assert captures == 1 + 4  # a graph for each table of copies, not for each copy
    assert driver.called.count("cuGraphLaunch") == 9 * (1 + 1 + 3 + 1 + 1)


def test_a_graph_begins_with_its_steps_numbers_and_ends_with_its_results():
    driver, one = RecordingDriver(True), Launch("k", b"", [], [], (5, 1, 1), (32, 1, 1))
    results = [Result(4096, (2, 2), mx.uint32), Result(8192, (2, 3), mx.float32)]
    driver.graph([(one, [1]), (one, [2])], 64, [(128, 256, 8), (512, 1024, 12)], results)
    assert [blocks for blocks, *_ in driver.launches] == [[1, 1, 1], [5, 1, 1], [5, 1, 1], [1, 1, 1]]
    assert [attributes for *_, attributes in driver.launches] == [[]] + 3 * [[(PROGRAMMATIC_STREAM_SERIALIZATION, 1)]]
    assert driver.given[0] == (64, [(128, 256, 2), (512, 1024, 3)])
    [slot] = driver.memory
    host = ctypes.addressof(slot)
    assert driver.given[-1] == (0, [(host, 4096, 4), (host + 16, 8192, 6)]) and len(slot) == 16 + 24


def test_results_are_kept_until_they_are_read():
    """The next launch writes where they lie."""
    driver, one = RecordingDriver(True), Launch("k", b"", [], [], (5, 1, 1), (32, 1, 1))
    graph = driver.graph([(one, [1])], results=[Result(4096, (2, 2), mx.uint32)])
    [slot] = driver.memory
    found = []
    for i in range(3):
        found += graph.launch()
        ctypes.memmove(slot, np.arange(4 * i, 4 * i + 4, dtype=np.uint32).tobytes(), 16)
    assert [one.tolist() for one in found] == [[[4 * i, 4 * i + 1], [4 * i + 2, 4 * i + 3]] for i in range(3)]


@pytest.mark.parametrize("nbytes", [4, PIECE, PIECE + 16, 5 * PIECE - 4])
def test_what_is_copied_is_cut_into_pieces(nbytes):
    copies = cut_copy(1 << 46, 1 << 40, nbytes)
    ends = np.cumsum(copies["width"].astype(np.uint64))
    assert ends[-1] == nbytes and max(copies["width"]) <= PIECE and set(copies["height"]) == {1}
    assert np.array_equal(copies["to"][1:] - (1 << 46), ends[:-1]) and copies["to"][0] == 1 << 46
    assert np.array_equal(copies["to"] - copies["source"], np.full(len(copies), (1 << 46) - (1 << 40)))
