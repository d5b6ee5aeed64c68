"""The memory contract: what an engine takes in all, known before anything runs.

Weights are there already, activations follow from the longest step, and what is left of the limit is for keys, values
and states. Where too little is left the step gets shorter first; then it is refused, with the numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ..cache.memory import LayerSpec, Shared
from ..config import EngineConfig, nbytes
from ..errors import WontFit
from ..kernels import device
from ..models import CausalLM

SHORTEST = 16  # tokens: a step is not cut below
WIDE, NARROW = 4, 12  # of a token's widest and of its hidden vectors, how many a step holds at once
LOGITS = 4  # rows of logits in float32, and what sampling makes of them
GATHERED = 3  # of one layer's keys and values, as attention reads them
EXPERTS = 8  # of a token in a mixture: none known to us has more at its full width


@dataclass(frozen=True)
class Budget:
    """Bytes. `kv` is a limit, `activations` an estimate that lies above what was measured."""

    limit: int
    weights: int
    kv: int
    activations: int
    chunk: int  # tokens of the step that the activations are those of

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.activations


@dataclass(frozen=True)
class Cost:
    """What one request takes, in bytes: known before it runs."""

    weights: int
    kv: int  # prompt and answer, all of it new
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.activations


def weigh(model: CausalLM) -> int:
    found: Any = tree_flatten(model.parameters())
    return sum(array.nbytes for _, array in found)


def activations(model: CausalLM, specs: list[LayerSpec | Shared], chunk: int, running: int, kv: int) -> int:
    """Most bytes a step holds beside weights and pools: its widest layer, its logits, the keys it gathers."""
    logits = LOGITS * 4 * model.config.vocab_size * running
    return step_bytes(model, chunk) + logits + GATHERED * kv // owners(specs)


def step_bytes(model: CausalLM, chunk: int) -> int:
    """Of them, those that grow with the tokens of a step."""
    found: Any = tree_flatten(model.parameters())
    # A matrix gives a token as many numbers as it has rows; the embedding and the head are counted with the logits.
    wide = [rows(a) for _, a in found if a.ndim >= 2 and a.shape[-2] != model.config.vocab_size]
    narrow = min((a.shape[0] for name, a in found if a.ndim == 1 and "norm" in name), default=max(wide, default=1))
    return chunk * model.dtype.size * (WIDE * max(wide, default=1) + NARROW * max(narrow, 1))


def owners(specs: list[LayerSpec | Shared]) -> int:
    """Layers with memory of their own."""
    return max(1, sum(not isinstance(s, Shared) for s in specs))


def rows(matrix: mx.array) -> int:
    return int(matrix.shape[-2]) * (min(EXPERTS, int(matrix.shape[0])) if matrix.ndim > 2 else 1)


def divide(model: CausalLM, specs: list[LayerSpec | Shared], config: EngineConfig, chunk: int) -> Budget:
    """Who gets what of the memory. With a limit of the user's own, all of it has to fit."""
    weights, (total, free) = weigh(model), device.memory()
    asked = None if config.kv_memory is None else nbytes(config.kv_memory)
    if config.memory is None:
        kv = free // 2 if asked is None else asked
        return Budget(total, weights, kv, activations(model, specs, chunk, config.max_running, kv), chunk)
    limit = nbytes(config.memory)

    def fit(chunk: int) -> Budget:
        kv = asked
        if kv is None:
            rest = limit - weights - activations(model, specs, chunk, config.max_running, 0)
            kv = max(0, rest) * owners(specs) // (owners(specs) + GATHERED)
        return Budget(limit, weights, kv, activations(model, specs, chunk, config.max_running, kv), chunk)

    made = fit(chunk)
    while made.chunk > SHORTEST and (made.total > limit or step_bytes(model, made.chunk) > (limit - weights) // 4):
        made = fit(max(SHORTEST, made.chunk // 2))
    if made.total > limit or made.kv < 1:
        raise WontFit(
            f"memory is limited to {limit} bytes; the weights take {weights}, a step of {made.chunk} tokens "
            f"{made.activations}" + ("" if asked is None else f", keys and values {asked}") + "; raise memory or use a "
            "smaller model"
        )
    return made


class MlxLimits:
    """What MLX itself is told. It is told for the whole process, so closing an engine puts back what was there."""

    def __init__(self, budget: Budget, config: EngineConfig):
        self._before: list[tuple[Callable[[int], int], int]] = []
        kind = device.backend()
        if config.memory is not None:
            self._set(mx.set_memory_limit, budget.limit)
            self._set(mx.set_cache_limit, budget.activations)
        elif kind == "metal":
            self._set(mx.set_cache_limit, max(budget.limit - budget.weights - budget.kv, budget.activations))
        if kind == "metal":
            self._set(mx.set_wired_limit, min(budget.limit, device.memory()[0]))

    def _set(self, change: Callable[[int], int], value: int) -> None:
        self._before.append((change, change(value)))

    def restore(self) -> None:
        while self._before:
            change, value = self._before.pop()
            change(value)


def buffers(model: CausalLM, pools: dict[int, Any]) -> int:
    """Arrays the weights and pools are."""
    found: Any = tree_flatten(model.parameters())
    return len(found) + sum(map(len, list(pools.values())))


def check_buffers(count: int) -> None:
    """Metal gives a process so many buffers, whatever their size."""
    most = mx.device_info().get("resource_limit")
    if isinstance(most, int) and most and count > most // 2:
        raise WontFit(f"the weights and caches are {count} arrays, and the device gives {most} buffers in all")
