"""Processes that try mutants. One that a mutant kills is replaced, and its death is what noticed the mutant.

A pool of the standard library would wait for it for ever.
"""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

DIED = "death"


def serve(work: Callable[[Any], Any], line: Connection) -> None:
    while (task := line.recv()) is not None:
        line.send(work(task))


class Worker:
    def __init__(self, work: Callable[[Any], Any]):
        context = multiprocessing.get_context("spawn")
        self.line, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(work, theirs), daemon=True)
        self.process.start()
        theirs.close()  # else its end would not be ours to see


def each(work: Callable[[Any], Any], tasks: Sequence[Any], jobs: int) -> Iterator[tuple[Any, Any]]:
    """(task, what `work` made of it, or DIED), in the order they are done."""
    todo = list(reversed(tasks))
    busy: dict[Connection, tuple[Worker, Any]] = {}

    def start(worker: Worker) -> None:
        if todo:
            task = todo.pop()
            worker.line.send(task)
            busy[worker.line] = worker, task
        else:
            worker.line.send(None)

    for _ in range(min(jobs, len(todo))):
        start(Worker(work))
    while busy:
        for line in wait(list(busy)):
            worker, task = busy.pop(line)  # type: ignore[call-overload]
            try:
                result = worker.line.recv()
            except EOFError:
                result, worker = DIED, Worker(work)
            yield task, result
            start(worker)
