"""Prometheus metrics of the server, under vLLM's names where they mean the same, so that its dashboards work."""

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable

from ..engine.request import Event, Timings
from ..engine.stats import Stats

SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
RECENT, RECENT_S = 32, 600.0  # requests, and how long ago they ended at most
TOKENS = (1, 8, 32, 128, 512, 2048, 8192, 32768, 131072)


class Histogram:
    """Counts of values up to each bound, and their sum."""

    def __init__(self, name: str, text: str, bounds: tuple[float, ...]):
        self.name, self.text, self.bounds = name, text, bounds
        self._counts, self._sum, self._total = [0] * (len(bounds) + 1), 0.0, 0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self._sum += value
        self._total += 1

    def lines(self) -> Iterable[str]:
        yield f"# HELP {self.name} {self.text}"
        yield f"# TYPE {self.name} histogram"
        upto = 0
        for bound, count in zip(self.bounds, self._counts):
            upto += count
            yield f'{self.name}_bucket{{le="{bound:g}"}} {upto}'
        yield f'{self.name}_bucket{{le="+Inf"}} {self._total}'
        yield f"{self.name}_sum {self._sum:.9g}"
        yield f"{self.name}_count {self._total}"


class ServerMetrics:
    """What the server counts itself; the rest comes from the engines' `Stats`."""

    def __init__(self) -> None:
        self.began = time.time()
        self.first_token = Histogram("vllm:time_to_first_token_seconds", "From submission to the first token.", SECONDS)
        self.per_token = Histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time of a request's tokens.", SECONDS
        )
        self.latency = Histogram("vllm:e2e_request_latency_seconds", "From submission to the last token.", SECONDS)
        self.prompt = Histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        self.generated = Histogram("vllm:request_generation_tokens", "Generated tokens of a request.", TOKENS)
        self.success: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self._ends: deque[float] = deque(maxlen=RECENT)  # when the last requests ended, on time.monotonic

    def record(self, event: Event) -> None:
        """A request's last event."""
        t: Timings | None = event.timings
        if t is None or event.finish_reason is None:
            return
        self._ends.append(time.monotonic())
        self.success[str(event.finish_reason)] += 1
        self.tokens.update(prompt=t.prompt_tokens, cached=t.cached_tokens, generated=t.generated_tokens)
        self.prompt.observe(t.prompt_tokens)
        self.generated.observe(t.generated_tokens)
        self.latency.observe(t.total_s)
        if t.generated_tokens:
            self.first_token.observe(t.first_token_s)
        if t.generated_tokens > 1:
            self.per_token.observe((t.total_s - t.first_token_s) / (t.generated_tokens - 1))

    def seconds_per_request(self) -> float:
        """How long it has lately taken until the next request ended: the queue gets shorter so often. An idle hour
        says nothing about that."""
        now = time.monotonic()
        ends = [end for end in self._ends if now - end < RECENT_S]
        return (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else 1.0

    def write(self, stats: dict[str, Stats]) -> str:
        lines: list[str] = []
        for name, text, read in GAUGES:
            lines += write_series(name, text, "gauge", {model: read(s) for model, s in stats.items()})
        for name, text, read in COUNTERS:
            lines += write_series(name, text, "counter", {model: read(s) for model, s in stats.items()})
        for name, kind, text in TOKEN_COUNTERS:
            lines += [f"# HELP {name} {text}", f"# TYPE {name} counter", f"{name} {self.tokens[kind]}"]
        lines += [
            "# HELP vllm:request_success_total Requests by how they ended.",
            "# TYPE vllm:request_success_total counter",
        ]
        lines += [
            f'vllm:request_success_total{{finished_reason="{reason}"}} {n}'
            for reason, n in sorted(self.success.items())
        ]
        for histogram in (self.first_token, self.per_token, self.latency, self.prompt, self.generated):
            lines += histogram.lines()
        return "\n".join(lines) + "\n"


GAUGES = (
    ("vllm:num_requests_running", "Requests that are being computed.", lambda s: s.running),
    ("vllm:num_requests_waiting", "Requests in the queue.", lambda s: s.waiting),
    (
        "vllm:kv_cache_usage_perc",
        "Share of the KV cache in use, 0 to 1.",
        lambda s: s.kv_bytes / s.kv_limit if s.kv_limit else 0,
    ),
    ("mlxrt:memory_bytes", "Bytes that MLX holds.", lambda s: s.bytes.get("active", 0)),
    ("mlxrt:output_tokens_per_second", "Generated tokens a second, lately.", lambda s: s.output_tps),
)
TOKEN_COUNTERS = (  # vLLM counts tokens in its prefix cache, not lookups
    ("vllm:prompt_tokens_total", "prompt", "Prompt tokens."),
    ("vllm:generation_tokens_total", "generated", "Generated tokens."),
    ("vllm:prompt_tokens_cached_total", "cached", "Prompt tokens from the prefix cache."),
    ("vllm:prefix_cache_queries_total", "prompt", "Prompt tokens that were looked up in the prefix cache."),
    ("vllm:prefix_cache_hits_total", "cached", "Prompt tokens that the prefix cache had."),
)
COUNTERS = (
    ("vllm:num_preemptions_total", "Times a request's memory was taken.", lambda s: s.preemptions),
    ("mlxrt:prefix_cache_resumed_total", "Lookups that found a prefix.", lambda s: s.hits),
    ("mlxrt:prefix_cache_lookups_total", "Lookups in the prefix cache.", lambda s: s.hits + s.misses),
    ("mlxrt:prefix_cache_evictions_total", "Nodes evicted from the prefix cache.", lambda s: s.evictions),
)


def write_series(name: str, text: str, kind: str, values: dict[str, float]) -> list[str]:
    lines = [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
    return lines + [f'{name}{{model_name="{escape(model)}"}} {value:.9g}' for model, value in values.items()]


def escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
