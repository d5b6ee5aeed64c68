"""Metrics counted while the engine runs, and `Stats`: what it holds and has done at one moment.

Each owner (scheduler, pools, prefix cache, metrics) contributes its part; `EngineCore.stats` joins them.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ..cache.storage import DiskStats

WINDOW = 10.0  # seconds that rates look back
SAMPLES = 4096  # newest latencies that percentiles are taken of
QUANTILES = (50, 90, 99)


@dataclass(frozen=True)
class Stats:
    """What an engine does now, and has done since it was loaded."""

    running: int
    waiting: int
    kv_bytes: int  # in blocks that are in use
    kv_live: int  # of them, those of running sequences
    kv_stored: int  # those of cached prefixes
    kv_shared: int  # those of both
    kv_allocated: int
    kv_limit: int
    stored_nodes: int
    hits: int
    misses: int
    reused_tokens: int
    evictions: int
    checkpoints: dict[int, int]  # tokens between two of them -> how often; empty where any length can be resumed
    preemptions: int
    positions: int  # tokens run through the model
    peak_memory: int
    disk: DiskStats | None  # None without disk_cache
    chunk: int  # most tokens in one step
    requests: int  # started so far
    finished: dict[str, int]  # finish reason -> requests
    input_tps: float  # prompt tokens computed per second of the last ten
    output_tps: float  # tokens generated
    cached_share: float  # of all prompt tokens, those that were not computed again
    stall_bound: int  # prompt tokens that may be computed between two tokens of a stream
    longest_stall: int  # that were
    stalls: dict[int, int]  # prompt tokens between two tokens, up to this power of two -> how often
    first_token_ms: dict[int, float]  # per cent of requests -> milliseconds from submission, at most
    inter_token_ms: dict[int, float]  # per cent of tokens -> milliseconds since the one before, at most
    memory_limit: int  # bytes the engine may take in all
    bytes: dict[str, int]  # by use: weights, kv, activations, and what MLX holds (active, cache)
    buffers: int  # arrays of the weights and pools


class Metrics:
    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.clock = clock
        self.finished: Counter[str] = Counter()
        self._steps: deque[tuple[float, int, int]] = deque()  # when, prompt tokens computed, tokens generated
        self._first: deque[float] = deque(maxlen=SAMPLES)
        self._between: deque[float] = deque(maxlen=SAMPLES)
        self._prefill_seconds = self._prefill_tokens = 0.0

    def add_step(self, computed: int, generated: int) -> None:
        now = self.clock()
        self._steps.append((now, computed, generated))
        while now - self._steps[0][0] > WINDOW:
            self._steps.popleft()

    def add_first_token(self, seconds: float) -> None:
        self._first.append(seconds)

    def add_inter_token(self, seconds: float) -> None:
        self._between.append(seconds)

    def add_prefill(self, tokens: int, seconds: float) -> None:
        """A step with prompt tokens took so long. Older steps count less and less."""
        self._prefill_tokens = 0.8 * self._prefill_tokens + tokens
        self._prefill_seconds = 0.8 * self._prefill_seconds + seconds

    @property
    def prefill_rate(self) -> float | None:
        """Prompt tokens a second, lately; None before the first."""
        return self._prefill_tokens / self._prefill_seconds if self._prefill_seconds else None

    def rates(self) -> tuple[float, float]:
        """Prompt tokens computed and tokens generated, per second of the last WINDOW."""
        now = self.clock()
        recent = [s for s in list(self._steps) if now - s[0] <= WINDOW]
        if not recent:
            return 0.0, 0.0
        span = max(now - recent[0][0], 1e-9) if len(recent) > 1 else WINDOW
        return sum(s[1] for s in recent) / span, sum(s[2] for s in recent) / span

    def stats(self) -> dict[str, Any]:
        """The metrics' part of `Stats`."""
        input_tps, output_tps = self.rates()
        return dict(
            finished=dict(self.finished),
            input_tps=input_tps,
            output_tps=output_tps,
            first_token_ms=percentiles(self._first),
            inter_token_ms=percentiles(self._between),
        )


def percentiles(seconds: Iterable[float]) -> dict[int, float]:
    """Per cent -> milliseconds that so many of the latencies did not exceed; empty without any."""
    ordered = sorted(seconds)
    if not ordered:
        return {}
    return {q: 1e3 * ordered[min(len(ordered) - 1, -(-q * len(ordered) // 100) - 1)] for q in QUANTILES}
