"""The suites: each is a list of cases, each case a function from a comparison to figures."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module

from ..comparison import Comparison, Options
from ..result import Figure


@dataclass(frozen=True)
class Case:
    suite: str
    name: str
    run: Callable[[Comparison], Iterator[Figure]]
    weight: float = 1.0  # share of the time


def cases(suite: str, options: Options) -> list[Case]:
    """The cases of an existing suite."""
    return import_module(f".{suite}", __name__).cases(options)
