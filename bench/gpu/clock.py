"""What recorded launches take as one graph: on the device alone, and for the host that launches them."""

import ctypes
import statistics
import time

from mlxrt.kernels.cuda.graph import Driver, Graph
from mlxrt.kernels.cuda.nvrtc import Launch, Library


class Clock:
    """How long launches take, on arrays as they were when these were recorded."""

    def __init__(self, library: Library):
        self.driver = Driver(library)

    def graph(self, launches: list[Launch]) -> Graph:
        """All of them, one after another."""
        arrays = {id(a): a for one in launches for a in (*one.inputs, *one.outputs)}
        at = dict(zip(arrays, self.driver.addresses(list(arrays.values()))))
        return self.driver.graph([(one, [at[id(a)] for a in (*one.inputs, *one.outputs)]) for one in launches])

    def seconds(self, launches: list[Launch], rounds: int = 15) -> float:
        """Of the device, without the launch of the graph."""
        driver, graph = self.driver, self.graph(launches)
        events = [ctypes.c_void_p() for _ in range(2)]
        for event in events:
            driver("cuEventCreate", ctypes.byref(event), 0)
        spent = []
        for _ in range(rounds):
            driver("cuEventRecord", events[0], driver.stream)
            graph.launch()
            driver("cuEventRecord", events[1], driver.stream)
            driver.wait()
            took = ctypes.c_float()
            driver("cuEventElapsedTime", ctypes.byref(took), *events)
            spent.append(took.value / 1e3)
        return statistics.median(spent[3:])

    def waited(self, launches: list[Launch], rounds: int = 8) -> float:
        """Seconds from the launch of the graph until the host knows that it is done."""
        graph, spent = self.graph(launches), []
        for _ in range(rounds):
            began = time.perf_counter()
            graph.launch()
            self.driver.wait()
            spent.append(time.perf_counter() - began)
        return statistics.median(spent[3:])
