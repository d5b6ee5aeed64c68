"""Simulated kernels that remember: the same kernel is run on the same numbers once in a process.

Tests that compare runs of a model launch most kernels again on what they had before, as long as all is right.
"""

import hashlib
from typing import Any

import mlx.core as mx

from ..metal_sim import Simulator, arrays

MAX_BYTES = 1 << 28


class Kept:
    """What kernels made, by what they were given. All of it is forgotten when it becomes too much."""

    def __init__(self) -> None:
        self._results: dict[Any, list[tuple[bytes, tuple[int, ...], mx.Dtype]]] = {}
        self._nbytes = 0

    def find(self, key: Any) -> list[mx.array] | None:
        found = self._results.get(key)
        return None if found is None else [arrays.array(*result) for result in found]

    def keep(self, key: Any, made: list[mx.array]) -> None:
        if self._nbytes > MAX_BYTES:
            self._results.clear()
            self._nbytes = 0
        self._results[key] = [(arrays.memory(mx.contiguous(x))[0], x.shape, x.dtype) for x in made]
        self._nbytes += sum(x.nbytes for x in made)


KEPT = Kept()


class RememberingKernel:
    """A kernel of the simulator, called as it is."""

    def __init__(self, sim: Simulator, definition: dict[str, Any]):
        self._kernel = sim.metal_kernel(**definition)
        self._key = sim.order, sim.seed, sim.checked, self._kernel.definition, self._kernel.ensure_row_contiguous

    def __call__(self, *, inputs, **rest) -> list[mx.array]:
        given = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
        given = [mx.contiguous(x) for x in given] if self._kernel.ensure_row_contiguous else given
        mx.eval(given)
        key = self._key, repr(sorted(rest.items())), tuple(map(describe, given))
        made = KEPT.find(key)
        if made is None:
            made = self._kernel(inputs=given, **rest)
            KEPT.keep(key, made)
        return made


def describe(x: mx.array) -> Any:
    raw, strides, offset = arrays.memory(x)
    return hashlib.blake2b(raw, digest_size=16).digest(), tuple(strides), offset, x.shape, x.dtype
