"""What CUDA's driver is told of a graph's kernels, on a machine without one."""

import ctypes
from pathlib import Path

import mlx.core as mx
import pytest

from mlxrt.kernels.cuda.graph import PROGRAMMATIC_STREAM_SERIALIZATION, Driver
from mlxrt.kernels.cuda.nvrtc import WAIT, Launch, Library, cuda_source


class RecordingDriver(Driver):
    """Notes what it is to launch."""

    def __init__(self, overlaps):
        self.stream, self._overlaps, self.launches = ctypes.c_void_p(7), overlaps, []

    def __call__(self, name, *arguments):
        if name == "cuLaunchKernelEx":
            config = arguments[0].contents
            told = [config.attributes[i] for i in range(config.num_attributes)]
            attributes = [(attribute.id, attribute.value[0]) for attribute in told]
            self.launches.append((list(config.blocks), list(config.threads), config.stream, attributes))

    def enter(self):
        pass

    def function(self, launch):
        return ctypes.c_void_p(1)


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
