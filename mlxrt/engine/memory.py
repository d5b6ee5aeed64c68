"""The memory plan: what an engine takes in all, known before anything runs; and the chunk size that goes with it.

Weights are there already, activations follow from the longest step, and what is left of the limit is for the KV cache
and recurrent states. Where too little is left the step gets shorter first; then it is refused, with the numbers.

The chunk size is the smallest step that keeps the device busy, for streams wait meanwhile. On a GPU a few forward
passes are timed when the engine starts. A CPU is busy with a few rows already, and timing them would take longer than
most answers: there a rule stands for the measurement (docs/decisions/0018-scheduler-shares-and-chunk.md).
"""

import logging
import math
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard

import mlx.core as mx
from mlx.utils import tree_flatten

from ..cache.memory import LayerSpec, Shared
from ..config import EngineConfig, nbytes
from ..errors import BadRequest, WontFit, is_out_of_memory
from ..kernels import device
from ..kernels.ops.qmm import MAX_QMM_ROWS
from ..models import CausalLM
from ..models.fused_linear import matrix_of

log = logging.getLogger("mlxrt")

MIN_CHUNK = 16  # tokens: a step is not cut below
WIDE_BUFFERS, HIDDEN_BUFFERS = 4, 12  # of a token's widest and of its hidden vectors, how many a step holds at once
LOGITS_BUFFERS = 4  # float32 logits of a row, and what sampling makes of them
KV_BUFFERS = 3  # one layer's keys and values, as attention reads them
LAYERS_AHEAD = 5  # that MLX launches at once on CUDA: a hundred ops
FILL_RATE = 20e9  # bytes a second that another program takes of the device, at most
MAX_EXPERTS = 8  # of a token in a mixture: no known model has more at its full width

CHUNK_SIZES = (256, 512, 1024, 2048)  # tokens, timed on a GPU
MIN_RATE = 0.92  # of the best rate
MAX_TUNING_SECONDS = 2.0
CPU_CHUNK = 128  # rows that keep a CPU's arithmetic busy
SMALL_MODEL = 40_000_000  # bytes of weights below which Python, not the CPU's arithmetic, takes the time of a step


@dataclass(frozen=True)
class MemoryPlan:
    """In bytes. `kv` is a limit, `activations` an estimate above what was measured."""

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


def weight_bytes(model: CausalLM) -> int:
    arrays: Any = tree_flatten(model.parameters())
    return sum(array.nbytes for _, array in arrays)


def activation_bytes(model: CausalLM, specs: list[LayerSpec | Shared], chunk: int, running: int, kv: int) -> int:
    """Most bytes a step holds beside weights and pools: its widest layer, its logits, the keys it gathers."""
    logits = LOGITS_BUFFERS * 4 * model.config.vocab_size * running
    return step_bytes(model, chunk) + logits + KV_BUFFERS * kv // count_kv_layers(specs)


def step_bytes(model: CausalLM, chunk: int) -> int:
    """Of them, those that grow with the tokens of a step."""
    found: Any = tree_flatten(model.parameters())
    # A matrix gives a token as many values as it has rows; the embedding and the head are counted with the logits.
    wide = [row_count(a) for _, a in found if a.ndim >= 2 and a.shape[-2] != model.config.vocab_size]
    narrow = min((a.shape[0] for name, a in found if a.ndim == 1 and "norm" in name), default=max(wide, default=1))
    return chunk * model.dtype.size * (WIDE_BUFFERS * max(wide, default=1) + HIDDEN_BUFFERS * max(narrow, 1))


class StepMemory:
    """What a prefill step takes of the device beside weights and pools. The plan was made when the engine was loaded,
    and other programs and engines have taken memory since; so the device is asked again, as often as what was free
    could have been taken: on CUDA that takes a millisecond.

    MLX launches several layers at once and keeps all their buffers until they are done; it waits before the next ones
    where its limit says so."""

    def __init__(self, model: CausalLM, specs: list[LayerSpec | Shared], running: int, limit: int):
        """`running` rows may end in a step; MLX may hold `limit` bytes in all."""
        self.token, self.running = step_bytes(model, 1), running
        self.logits = LOGITS_BUFFERS * 4 * model.config.vocab_size  # of a row
        # Matrices dequantised, which steps of many rows multiply by: those of the layers that are launched at once. A
        # CPU unpacks a tile at a time.
        cuda, sizes = device.backend() == "cuda", dequantised_bytes(model) if device.backend() != "cpu" else []
        ahead = LAYERS_AHEAD * sum(sizes) // max(model.config.num_hidden_layers, 1) if cuda else 0
        self.dense = max(2 * max(sizes, default=0), ahead)
        self.kv_buffers = KV_BUFFERS * (LAYERS_AHEAD if cuda else 1)  # times a layer's keys and values
        self.specs, self.limit = specs, limit
        self._asked, self._free = -math.inf, 0  # when the device was asked, and what was free with what MLX held then

    def fit(self, tokens: int, decoding: int = 0, context: int = 0) -> tuple[int, str]:
        """How many of these prompt tokens a step can have now, beside `decoding` rows, and what is short if they are
        fewer. `context`: of the longest prompt, with this step."""
        need, keys = self.bytes_of(tokens, decoding, context), self.key_bytes(tokens, context)
        spare = self._free - mx.get_active_memory() - need
        if time.monotonic() - self._asked < spare / FILL_RATE:
            return tokens, ""
        total, free = device.memory()
        if need > free:
            device.release_cache()
            total, free = device.memory()
        device.limit_mlx(self.limit, free, self.dense)
        self._asked, self._free = time.monotonic(), mx.get_active_memory() + free
        if need <= free:
            return tokens, ""
        fits = self.tokens_in(free - keys - self.dense, decoding)
        if fits <= MAX_QMM_ROWS:
            fits = min(self.tokens_in(free - keys, decoding), MAX_QMM_ROWS)
        shortage = f"a step of {tokens} tokens takes {need} bytes, the device has {free} of {total} bytes free"
        return (min(fits, tokens) if fits >= min(tokens, MIN_CHUNK) else 0), shortage

    def bytes_of(self, tokens: int, decoding: int = 0, context: int = 0) -> int:
        rows = min(tokens + decoding, self.running)  # whose logits the step may make
        dense = self.dense if tokens > MAX_QMM_ROWS else 0
        return tokens * self.token + rows * self.logits + dense + self.key_bytes(tokens, context)

    def key_bytes(self, tokens: int, context: int) -> int:
        """Keys and values that attention gathers for a prompt's step, of the layers that are launched at once."""
        return self.kv_buffers * max(
            (spec.gathered_bytes(context, tokens) for spec in self.specs if has_cache(spec)), default=0
        )

    def tokens_in(self, free: int, decoding: int) -> int:
        """Prompt tokens of a step that takes these bytes, but for dequantised matrices and gathered keys."""
        few = (free - decoding * self.logits) // (self.token + self.logits)  # each of them may end a prompt
        return max(few if few + decoding < self.running else (free - self.running * self.logits) // self.token, 0)


def dequantised_bytes(model: CausalLM) -> list[int]:
    """Of each packed matrix but embeddings and the head."""
    matrices = [matrix for _, module in model.named_modules() if (matrix := matrix_of(module)) is not None]
    return [m.rows * m.width * model.dtype.size for m in matrices if m.packed and m.rows != model.config.vocab_size]


def count_kv_layers(specs: list[LayerSpec | Shared]) -> int:
    """Layers with a cache of their own."""
    return max(1, sum(map(has_cache, specs)))


def has_cache(spec: LayerSpec | Shared) -> TypeGuard[LayerSpec]:
    """Of its own."""
    return not isinstance(spec, Shared)


def row_count(matrix: mx.array) -> int:
    return int(matrix.shape[-2]) * (min(MAX_EXPERTS, int(matrix.shape[0])) if matrix.ndim > 2 else 1)


def plan_memory(
    model: CausalLM, specs: list[LayerSpec | Shared], config: EngineConfig, chunk: int, weights: int | None = None
) -> MemoryPlan:
    """Divide the memory. Under a limit of the user's own, all of it has to fit. `weights`: if not the model's bytes."""
    weights, (total, free) = weight_bytes(model) if weights is None else weights, device.memory()
    asked = None if config.kv_memory is None else nbytes(config.kv_memory)
    if config.memory is None:
        kv = free // 2 if asked is None else asked
        chunk = fit_chunk_size(model, specs, config, chunk, max(free - kv, free // 2))
        return MemoryPlan(total, weights, kv, activation_bytes(model, specs, chunk, config.max_running, kv), chunk)
    limit = nbytes(config.memory)

    def fit(chunk: int) -> MemoryPlan:
        kv = asked
        if kv is None:
            rest = limit - weights - activation_bytes(model, specs, chunk, config.max_running, 0)
            kv = max(0, rest) * count_kv_layers(specs) // (count_kv_layers(specs) + KV_BUFFERS)
        return MemoryPlan(limit, weights, kv, activation_bytes(model, specs, chunk, config.max_running, kv), chunk)

    plan = fit(chunk)
    while plan.chunk > MIN_CHUNK and (plan.total > limit or step_bytes(model, plan.chunk) > (limit - weights) // 4):
        plan = fit(max(MIN_CHUNK, plan.chunk // 2))
    if plan.total > limit or plan.kv < 1:
        raise WontFit(
            f"memory is limited to {limit} bytes; the weights take {weights}, a step of {plan.chunk} tokens "
            f"{plan.activations}" + ("" if asked is None else f", keys and values {asked}") + "; raise memory or use a "
            "smaller model"
        )
    return plan


def choose_context(own: int, asked: int | None, fits: int) -> int:
    """Tokens a sequence may hold, of a model that holds `own` and memory that holds `fits`."""
    if asked is not None and asked > own:
        raise BadRequest(f"max_context {asked} is beyond the model's own {own} tokens")
    if asked is not None and asked > fits:
        raise WontFit(f"max_context {asked} does not fit: {fits} tokens do; lower it or raise kv_memory")
    return min(asked or own, fits)


def fit_chunk_size(
    model: CausalLM, specs: list[LayerSpec | Shared], config: EngineConfig, chunk: int, rest: int
) -> int:
    """The longest step up to `chunk` tokens that fits in `rest` bytes of the device."""
    while (need := activation_bytes(model, specs, chunk, config.max_running, 0)) > rest and chunk > MIN_CHUNK:
        chunk = max(MIN_CHUNK, chunk // 2)
    if need > rest:
        total, free = device.memory()
        raise WontFit(
            f"a step of {chunk} tokens needs {need} bytes beside the KV cache, the device has {free} of {total} bytes "
            "free; lower max_running, use a smaller model, or close other engines and programs"
        )
    return chunk


@contextmanager
def refuse_overflow(name: str) -> Iterator[None]:
    """WontFit, with the numbers, where the device turns out to be full after all. What was allocated is freed."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        message = str(error)
        traceback.clear_frames(error.__traceback__)  # their locals hold what fills the device
    else:
        return
    device.release_cache()
    total, free = device.memory()
    raise WontFit(
        f"{name} does not fit: the device ran out of memory ({message}); without it {free} of {total} bytes are free; "
        "use a smaller model, kv_memory or chunk, or close other engines and programs"
    )


class MlxLimits:
    """MLX's own memory limits; StepMemory lowers that of memory. They hold for the process, so closing an engine
    restores those before."""

    def __init__(self, plan: MemoryPlan, config: EngineConfig):
        self._before: list[tuple[Callable[[int], int], int]] = []
        kind = device.backend()
        self._set(mx.set_memory_limit, plan.limit if config.memory is not None else mx.get_memory_limit())
        if config.memory is not None:
            self._set(mx.set_cache_limit, plan.activations)
        elif kind == "metal":
            self._set(mx.set_cache_limit, max(plan.limit - plan.weights - plan.kv, plan.activations))
        if kind == "metal":
            self._set(mx.set_wired_limit, min(plan.limit, device.memory()[0]))

    def _set(self, change: Callable[[int], int], value: int) -> None:
        self._before.append((change, change(value)))

    def restore(self) -> None:
        while self._before:
            change, value = self._before.pop()
            change(value)


def count_buffers(model: CausalLM, pools: dict[int, Any]) -> int:
    """Arrays of the weights and pools."""
    arrays: Any = tree_flatten(model.parameters())
    return len(arrays) + sum(map(len, list(pools.values())))


def check_buffers(count: int) -> None:
    """Metal limits the buffers of a process, whatever their size."""
    most = mx.device_info().get("resource_limit")
    if isinstance(most, int) and most and count > most // 2:
        raise WontFit(f"the weights and caches are {count} arrays, and the device gives {most} buffers in all")


# Chunk size


def max_chunk_size(model: CausalLM) -> int:
    """The longest step that tuning may choose."""
    return CHUNK_SIZES[-1] if device.backend() != "cpu" else cpu_chunk_size(model)


def cpu_chunk_size(model: CausalLM) -> int:
    return CPU_CHUNK if weight_bytes(model) > SMALL_MODEL else CHUNK_SIZES[1]


def tune_chunk_size(model: CausalLM, trial: Callable[[int], mx.array], most: int) -> int:
    """Tokens of a step, `most` at most. `trial` runs one."""
    if device.backend() == "cpu":
        return min(cpu_chunk_size(model), most)
    rates = measure_rates(trial, most)
    if not rates:
        return most
    best = max(rates.values())
    chunk = min(n for n, rate in rates.items() if rate >= MIN_RATE * best)
    measured = ", ".join(f"{n}: {rate:,.0f}" for n, rate in rates.items())
    log.info(f"chunk {chunk} tokens a step (tokens/s by chunk size: {measured}; set EngineConfig.chunk to override)")
    return chunk


def measure_rates(trial: Callable[[int], mx.array], most: int) -> dict[int, float]:
    """Tokens per second by chunk size, as far as MAX_TUNING_SECONDS allow."""
    rates: dict[int, float] = {}
    began = time.perf_counter()
    for n in CHUNK_SIZES:
        if n > most or (rates and time.perf_counter() - began > MAX_TUNING_SECONDS):
            break
        mx.eval(trial(n))  # compiles kernels, allocates memory
        start = time.perf_counter()
        mx.eval(trial(n))
        mx.synchronize()
        rates[n] = n / (time.perf_counter() - start)
    return rates
