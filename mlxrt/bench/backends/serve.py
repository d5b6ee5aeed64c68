"""A backend's half of the protocol: a setting, then questions on stdin; each answered in one line of JSON."""

import json
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from mlxrt.errors import MlxrtError


class Clock:
    """Seconds from the call to each token: wall time, and CPU time of this process with all its threads."""

    def __init__(self, start: float | None = None):
        self.at: list[float] = []
        self.used: list[float] = []
        self._wall, self._cpu = time.perf_counter() if start is None else start, time.process_time()

    def mark(self) -> None:
        self.at.append(time.perf_counter() - self._wall)
        self.used.append(time.process_time() - self._cpu)

    def to_dict(self) -> dict[str, list[float]]:
        return {"at": self.at, "used": self.used}


def run_clients(
    requests: list[dict[str, Any]], start: float, answer: Callable[[dict[str, Any], float], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Send each request from its own thread, `after` seconds from the start; `answer` gets the time it was sent."""
    rows: list[dict[str, Any]] = [{} for _ in requests]

    def send(row: int) -> None:
        began = start + requests[row]["after"]
        time.sleep(max(0.0, began - time.perf_counter()))
        rows[row] = answer(requests[row], began)

    clients = [threading.Thread(target=send, args=(row,)) for row in range(len(requests))]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    if not all(rows):
        raise MlxrtError("one of the requests of a batch got no answer")
    return rows


@dataclass
class Arrivals:
    """Requests that arrive while others run. `rows` holds every request's tokens and their times from its arrival."""

    requests: list[dict[str, Any]]  # each arrives `after` so many seconds
    submit: Callable[[dict[str, Any]], int]
    step: Callable[[list[int]], Iterable[tuple[int, int, bool]]]  # running ids -> (id, token, whether it was the last)
    on_token: Callable[[int], None] = lambda row: None
    late_after: int | None = None  # instead: `late` requests arrive once all others have so many tokens

    def run(self) -> dict[str, Any]:
        self.rows: list[dict[str, list]] = [{"tokens": [], "at": []} for _ in self.requests]
        self.waiting, running, arrived = list(range(len(self.requests))), dict[int, int](), dict[int, float]()
        start, cpu = time.perf_counter(), time.process_time()
        while self.waiting or running:
            now = time.perf_counter() - start
            for row in [row for row in self.waiting if self.is_due(self.requests[row], now)]:
                self.waiting.remove(row)
                running[self.submit(self.requests[row])] = row
                arrived[row] = self.requests[row].get("after", now)
            if not running:
                time.sleep(0.0005)
                continue
            events = list(self.step(list(running)))
            now = time.perf_counter() - start
            for id, token, last in events:
                row = running.pop(id) if last else running[id]
                self.rows[row]["tokens"].append(token)
                self.rows[row]["at"].append(now - arrived[row])
                self.on_token(row)
        spent = {"seconds": time.perf_counter() - start, "seconds_used": time.process_time() - cpu}
        return {"rows": self.rows, **spent}

    def is_due(self, request: dict[str, Any], now: float) -> bool:
        if self.late_after is None:
            return request["after"] <= now
        early = [row for other, row in zip(self.requests, self.rows) if not other["late"]]
        return not request["late"] or all(len(row["tokens"]) >= self.late_after for row in early)

    @property
    def all_running(self) -> bool:
        """Whether every request has arrived and has a token."""
        return not self.waiting and all(row["tokens"] for row in self.rows)

    @property
    def token_count(self) -> int:
        """Prompt and output tokens so far."""
        return sum(len(a["prompt"]) + len(b["tokens"]) for a, b in zip(self.requests, self.rows))


class Served(ABC):
    """What a backend implements, besides a method per question."""

    @abstractmethod
    def info(self) -> dict[str, Any]:
        """About itself: engine, lines it logged while loading, seconds that took."""

    def reply(self, question: dict[str, Any]) -> Any:
        return getattr(self, question.pop("do"))(**question)


def serve(start: Callable[[dict[str, Any]], Served]) -> None:
    """Answer questions from stdin until it closes. Anything else that is printed goes to stderr."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    backend: Served | None = None
    for line in sys.stdin:
        question = json.loads(line)
        try:
            if backend is None:
                backend = start(question)
                answer = backend.info()
            else:
                answer = backend.reply(question)
        except MlxrtError as error:  # the question was understood and refused; anything else ends the process
            answer = {"refused": str(error)}
        print(json.dumps(answer), file=out, flush=True)
