"""A device that launches graphs, without one: kernels run in the simulator, memory is MLX's own on the CPU."""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from mlxrt.kernels.cuda.graph import Result
from mlxrt.kernels.cuda.nvrtc import Launch, Library

from ..metal_sim import Simulator
from .kept_results import RememberingKernel

WHOLE = {1: np.uint8, 2: np.uint16, 4: np.uint32}  # numpy has no bfloat16


class FakeLibrary(Library):
    """Stands where compiled kernels come from: what it runs is the simulator, on Metal's text."""

    def __init__(self, sim: Simulator):
        self.sim, self._record = sim, None

    def __call__(self, **definition):
        kernel = RememberingKernel(self.sim, definition)

        def launch(*, inputs, **rest):
            made = kernel(inputs=inputs, **rest)
            code = Call(kernel, [(a.shape, a.dtype) for a in inputs], rest)
            self.record(Launch(definition["name"], code, list(inputs), list(made), (), ()))  # type: ignore[arg-type]
            return made

        return launch


@dataclass
class Call:
    """What a kernel was asked for, but for the numbers."""

    kernel: Any
    forms: list[tuple[tuple[int, ...], mx.Dtype]]
    rest: dict[str, Any]

    def __call__(self, addresses: list[int]) -> None:
        given = [read(at, *form) for at, form in zip(addresses, self.forms)]
        for at, made in zip(addresses[len(given) :], self.kernel(inputs=given, **self.rest), strict=True):
            raw = np.array(mx.contiguous(made).view(mx.uint8))
            ctypes.memmove(at, raw.ctypes.data, raw.nbytes)


class Bench:
    """Graphs are lists of calls. All happens when it is waited for: whoever does not wait reads old numbers."""

    def __init__(self) -> None:
        self._queue: list[Any] = []
        self._uploads: list[Any] = []  # kept for the copies that wait
        self.graphs = self.launched = self.flushes = 0

    def enter(self) -> None:
        pass

    def addresses(self, arrays: Sequence[mx.array]) -> list[int]:
        mx.eval(list(arrays))
        return [np.frombuffer(memoryview(a), np.uint8).ctypes.data for a in arrays]  # type: ignore[arg-type]

    def graph(self, launches, step=0, copies=(), results=()):
        self.graphs += 1
        return Graph(self, launches, step, copies, results)

    def copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        for copy in copies:
            self._queue.append(partial(ctypes.memmove, *copy))

    def copy_pieces(self, copies: np.ndarray) -> None:
        self.flushes += 1
        for to, source, width, height, to_pitch, source_pitch in copies.tolist():
            for row in range(height):
                self.copy([(to + row * to_pitch, source + row * source_pitch, width)])

    def upload(self, copies: Sequence[tuple[int, np.ndarray]]) -> None:
        copied = [(to, numbers.copy()) for to, numbers in copies]
        self._queue += [partial(ctypes.memmove, to, a.ctypes.data, a.nbytes) for to, a in copied]
        self._uploads.append(copied)

    def fetch(self, results: Sequence[Result]) -> "list[Fetched]":
        made = []
        for address, shape, dtype in results:
            out = Fetched(self, shape, np.uint32 if dtype == mx.uint32 else np.float32)
            self._queue.append(partial(ctypes.memmove, out.numbers.ctypes.data, address, out.numbers.nbytes))
            made.append(out)
        return made

    def wait(self) -> None:
        queue, self._queue = self._queue, []
        for do in queue:
            do()
        self._uploads.clear()

    def close(self) -> None:
        self.wait()


class Fetched:
    def __init__(self, device: Bench, shape: tuple[int, ...], dtype: type):
        self._device, self.numbers = device, np.zeros(shape, dtype)

    def tolist(self):
        self._device.wait()
        return self.numbers.tolist()


class Graph:
    def __init__(self, device: Bench, launches, step, copies, results):
        self._device, self._launches = device, launches
        self._step, self._copies, self._results = step, copies, results

    def launch(self) -> "list[Fetched]":
        self._device.launched += 1
        self._device._queue.append(self._run)
        return self._device.fetch(self._results)

    def _run(self) -> None:
        if self._copies:
            number = ctypes.c_uint32.from_address(self._step)
            for to, source, nbytes in self._copies:
                ctypes.memmove(to, source + number.value * nbytes, nbytes)
            number.value += 1
        for launch, addresses in self._launches:
            launch.code(addresses)


def read(address: int, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    raw = ctypes.string_at(address, math.prod(shape) * dtype.size)
    whole = np.frombuffer(raw, WHOLE[dtype.size]).reshape(shape)
    return mx.array(whole).view(dtype)
