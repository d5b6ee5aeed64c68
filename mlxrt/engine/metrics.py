"""What the engine counts while it runs: rates, waits, percentiles. Knows a clock and numbers, no requests."""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable

WINDOW = 10.0  # seconds that rates look back
SAMPLES = 4096  # newest waits that percentiles are taken of
QUANTILES = (50, 90, 99)


class Metrics:
    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.clock = clock
        self.requests = self.prompt_tokens = self.cached_tokens = self.computed_tokens = self.output_tokens = 0
        self.finished: Counter[str] = Counter()
        self._steps: deque[tuple[float, int, int]] = deque()  # when, prompt tokens computed, tokens given out
        self._first: deque[float] = deque(maxlen=SAMPLES)
        self._between: deque[float] = deque(maxlen=SAMPLES)
        self._prompt_time = self._prompt_work = 0.0

    def note_step(self, computed: int, given: int) -> None:
        now = self.clock()
        self.computed_tokens += computed
        self.output_tokens += given
        self._steps.append((now, computed, given))
        while now - self._steps[0][0] > WINDOW:
            self._steps.popleft()

    def note_start(self, prompt: int, cached: int) -> None:
        self.requests += 1
        self.prompt_tokens += prompt
        self.cached_tokens += cached

    def note_first(self, seconds: float) -> None:
        self._first.append(seconds)

    def note_next(self, seconds: float) -> None:
        self._between.append(seconds)

    def note_prompt_work(self, tokens: int, seconds: float) -> None:
        """A step with prompt tokens took so long. Older steps count less and less."""
        self._prompt_work = 0.8 * self._prompt_work + tokens
        self._prompt_time = 0.8 * self._prompt_time + seconds

    @property
    def prompt_rate(self) -> float | None:
        """Prompt tokens a second, lately; None before the first."""
        return self._prompt_work / self._prompt_time if self._prompt_time else None

    def rates(self) -> tuple[float, float]:
        """Prompt tokens computed and tokens given out, per second of the last WINDOW."""
        now = self.clock()
        recent = [s for s in list(self._steps) if now - s[0] <= WINDOW]
        if not recent:
            return 0.0, 0.0
        span = max(now - recent[0][0], 1e-9) if len(recent) > 1 else WINDOW
        return sum(s[1] for s in recent) / span, sum(s[2] for s in recent) / span

    @property
    def cached_share(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def first_token_ms(self) -> dict[int, float]:
        return percentiles(self._first)

    def inter_token_ms(self) -> dict[int, float]:
        return percentiles(self._between)


def percentiles(seconds: Iterable[float]) -> dict[int, float]:
    """Per cent -> milliseconds that so many of the waits did not exceed; empty without any."""
    found = sorted(seconds)
    if not found:
        return {}
    return {q: 1e3 * found[min(len(found) - 1, -(-q * len(found) // 100) - 1)] for q in QUANTILES}
