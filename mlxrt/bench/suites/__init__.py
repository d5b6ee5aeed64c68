"""The suites: each a list of cases, each case a function from a contest to figures."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module

from ..contest import Contest, Options
from ..result import Figure

SUITES = {
    "decode": "tokens per second after prompts of several lengths",
    "prefill": "prompt tokens per second",
    "prefix": "first token when most of the prompt is known: second turn, edited tail, restart",
    "batch": "many requests of mixed lengths, arriving one after the other",
    "kv": "kinds of keys and values: memory, speed, error of the logits",
    "kernels": "every kernel beside MLX's own op: time, bytes moved, share of copy bandwidth",
    "startup": "import, load, shell to first token",
    "quality": "perplexity and agreement of kinds of keys and values on real text",
}


@dataclass(frozen=True)
class Case:
    suite: str
    name: str
    run: Callable[[Contest], Iterator[Figure]]
    weight: float = 1.0  # of the time there is


def cases(suite: str, options: Options) -> list[Case]:
    """The cases of a suite that is known."""
    return import_module(f".{suite}", __name__).cases(options)
