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


MODULES = {"prefill": "decode", "kv": "decode", "batch": "serving"}  # of suites that share a module


def cases(suite: str, options: Options) -> list[Case]:
    """The cases of an existing suite."""
    found = import_module(f".{MODULES.get(suite, suite)}", __name__).cases(options)
    return [case for case in found if case.suite == suite]
