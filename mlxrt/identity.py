"""Which model a saved state belongs to. Anything different here makes the state unusable, and says which field."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

from .errors import BadSnapshot
from .models import CausalLM
from .text import Tokenizer

FORMAT = "1"


def identify(model: CausalLM, specs: list, tokenizer: Tokenizer | None, files: Iterable[Path]) -> dict[str, str]:
    """Reads every byte of the weights: asked for only when a state is saved or restored."""
    digest = hashlib.sha256()
    files = tuple(files)
    for path in files:
        with path.open("rb") as f:
            while piece := f.read(1 << 22):
                digest.update(piece)
    if not files:
        for name, array in tree_flatten(model.parameters()):
            digest.update(name.encode())
            digest.update(memoryview(mx.contiguous(array.reshape(-1).view(mx.uint8))))
    return {
        "format": FORMAT,
        "weights": digest.hexdigest(),
        "tokenizer": tokenizer.digest if tokenizer else "none",
        "cache": "; ".join(repr(spec) for spec in specs),
    }


def check_same(path: Path, saved: dict[str, str], here: dict[str, str]) -> None:
    for field, value in here.items():
        if saved.get(field) != value:
            raise BadSnapshot(
                f"{path} was saved with another {field} ({str(saved.get(field))[:60]!r}, here {value[:60]!r}); "
                "restore it with the model and settings it was made with"
            )
