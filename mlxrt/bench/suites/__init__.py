"""The suites: each a list of cases, each case a function from a contest to figures."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module

from ..contest import Contest, Options
from ..result import Figure


@dataclass(frozen=True)
class Case:
    suite: str
    name: str
    run: Callable[[Contest], Iterator[Figure]]
    weight: float = 1.0  # of the time there is


def cases(suite: str, options: Options) -> list[Case]:
    """The cases of a suite that is known."""
    return import_module(f".{suite}", __name__).cases(options)
