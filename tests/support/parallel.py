"""Parts of a long run in several processes."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import pairwise
from multiprocessing import get_context
from typing import Any, TypeVar

T = TypeVar("T")


def run_parts(work: Callable[..., T], parts: Iterable[tuple[Any, ...]], processes: int) -> Iterator[T]:
    """What `work(*part)` returns, as it comes. One process: here."""
    if processes == 1:
        for part in parts:
            yield work(*part)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(work, *part) for part in parts]):
            yield done.result()


def split(total: int, processes: int) -> list[tuple[int, int]]:
    """(first, count) of a part for each process."""
    bounds = [total * i // processes for i in range(processes + 1)]
    return [(a, b - a) for a, b in pairwise(bounds) if b > a]
