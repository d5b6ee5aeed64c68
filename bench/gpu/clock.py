"""Device time of recorded kernel launches, replayed as one CUDA graph: without MLX's host side."""

import ctypes
import statistics

from mlxrt.kernels.cuda.graph import Driver, Graph
from mlxrt.kernels.cuda.nvrtc import Launch, Library


class Clock:
    """Times launches on the arrays they were recorded with."""

    def __init__(self, library: Library):
        self.driver = Driver(library)

    def make_graph(self, launches: list[Launch]) -> Graph:
        """All of them, one after another."""
        arrays = {id(a): a for one in launches for a in (*one.inputs, *one.outputs)}
        at = dict(zip(arrays, self.driver.addresses(list(arrays.values()))))
        return self.driver.graph([(one, [at[id(a)] for a in (*one.inputs, *one.outputs)]) for one in launches])

    def device_seconds(self, launches: list[Launch], rounds: int = 15) -> float:
        """Median seconds on the device, between two CUDA events."""
        driver, graph = self.driver, self.make_graph(launches)
        events = [ctypes.c_void_p() for _ in range(2)]
        for event in events:
            driver("cuEventCreate", ctypes.byref(event), 0)
        spent = []
        for _ in range(rounds):
            driver("cuEventRecord", events[0], driver.stream)
            graph.launch()
            driver("cuEventRecord", events[1], driver.stream)
            driver.wait()
            milliseconds = ctypes.c_float()
            driver("cuEventElapsedTime", ctypes.byref(milliseconds), *events)
            spent.append(milliseconds.value / 1e3)
        return statistics.median(spent[3:])
