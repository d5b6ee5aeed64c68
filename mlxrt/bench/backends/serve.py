"""A backend's half of the protocol: a setting, then questions on stdin; each answered in one line of JSON."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

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


class Served(Protocol):
    """What a backend implements."""

    def info(self) -> dict[str, Any]:
        """About itself: engine, lines it logged while loading, seconds that took."""

    def reply(self, question: dict[str, Any]) -> Any:
        """Answer a question; `do` names the method."""


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
