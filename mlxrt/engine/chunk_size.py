"""How many tokens a step should have: enough to keep the device busy, no more than that, for a stream waits meanwhile.

On a GPU a few forward passes are timed when the engine starts. A CPU is busy with a few rows already, and timing them
would take longer than most answers: there a rule stands for the measurement
(docs/decisions/0018-scheduler-shares-and-chunk.md).
"""

import logging
import time
from collections.abc import Callable

import mlx.core as mx

from ..kernels import device
from ..models import CausalLM
from .memory import weigh

log = logging.getLogger("mlxrt")

SIZES = (256, 512, 1024, 2048)
ENOUGH = 0.92  # of the best rate
PATIENCE = 2.0  # seconds for all of it
BUSY = 128  # rows that keep a CPU's arithmetic busy
SMALL = 40_000_000  # bytes of weights below which Python, not the CPU's arithmetic, takes the time of a step


def longest(model: CausalLM) -> int:
    """The longest step that will be thought of."""
    return SIZES[-1] if device.backend() != "cpu" else rule(model)


def rule(model: CausalLM) -> int:
    """Without a measurement."""
    return BUSY if weigh(model) > SMALL else SIZES[1]


def choose(model: CausalLM, trial: Callable[[int], mx.array], most: int) -> int:
    """Tokens of a step, `most` at most. `trial` runs one."""
    if device.backend() == "cpu":
        return min(rule(model), most)
    rates = measure(trial, most)
    if not rates:
        return most
    chunk = pick(rates)
    told = ", ".join(f"{n}: {rate:,.0f}" for n, rate in rates.items())
    log.info(
        f"chunk {chunk}: steps of so many tokens (tokens a second, by tokens in a step: {told}; EngineConfig.chunk)"
    )
    return chunk


def measure(trial: Callable[[int], mx.array], most: int) -> dict[int, float]:
    """Tokens per second of steps of some sizes; of as many as there is patience for."""
    rates: dict[int, float] = {}
    began = time.perf_counter()
    for n in SIZES:
        if n > most or (rates and time.perf_counter() - began > PATIENCE):
            break
        mx.eval(trial(n))  # kernels are built, memory is taken
        start = time.perf_counter()
        mx.eval(trial(n))
        mx.synchronize()
        rates[n] = n / (time.perf_counter() - start)
    return rates


def pick(rates: dict[int, float]) -> int:
    """The smallest that is nearly as fast as the fastest."""
    best = max(rates.values())
    return min(n for n, rate in rates.items() if rate >= ENOUGH * best)
