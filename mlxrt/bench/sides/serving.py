"""A side's half of the conversation: a setting in, then questions; each answered in one line."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from mlxrt.errors import MlxrtError


class Clock:
    """Two clocks from the call to each token: the wall's, and the processor time of this process, all threads."""

    def __init__(self, start: float | None = None):
        self.at: list[float] = []
        self.used: list[float] = []
        self._start, self._cost = time.perf_counter() if start is None else start, time.process_time()

    def mark(self) -> None:
        self.at.append(time.perf_counter() - self._start)
        self.used.append(time.process_time() - self._cost)

    def to_dict(self) -> dict[str, list[float]]:
        return {"at": self.at, "used": self.used}


def arriving(
    requests: list[dict[str, Any]], start: float, answer: Callable[[dict[str, Any], float], dict[str, Any]]
) -> list[dict[str, Any]]:
    """The answers to requests that clients ask, each its own so long `after` the start; told when that is."""
    rows: list[dict[str, Any]] = [{} for _ in requests]

    def client(row: int) -> None:
        began = start + requests[row]["after"]
        time.sleep(max(0.0, began - time.perf_counter()))
        rows[row] = answer(requests[row], began)

    clients = [threading.Thread(target=client, args=(row,)) for row in range(len(requests))]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    if not all(rows):
        raise MlxrtError("one of the requests of a batch gave no answer")
    return rows


class Player(Protocol):
    """What a side has to offer."""

    def told(self) -> dict[str, Any]:
        """About itself: engine, what it said while loading, how long that took."""

    def reply(self, question: dict[str, Any]) -> Any:
        """`do` names what is wanted."""


def serve(start: Callable[[dict[str, Any]], Player]) -> None:
    """Answer the questions on stdin until there are no more. Anything else printed goes to stderr."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    player: Player | None = None
    for line in sys.stdin:
        question = json.loads(line)
        try:
            if player is None:
                player = start(question)
                answer = player.told()
            else:
                answer = player.reply(question)
        except MlxrtError as error:  # the call was understood and refused; anything else ends the process
            answer = {"refused": str(error)}
        print(json.dumps(answer), file=out, flush=True)
