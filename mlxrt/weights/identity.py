"""Which model a saved state belongs to. Anything different here makes the state unusable, and says which field."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ..errors import BadSnapshot
from ..models import CausalLM
from ..text import Tokenizer
from .load.fingerprint import weights_digest

FORMAT = "4"


def identify(
    model: CausalLM, specs: list, tokenizer: Tokenizer | None, files: Iterable[Path], block: int
) -> dict[str, str]:
    """Reads every byte of the weights, the first time: asked for only when something is kept beyond this process."""
    files = tuple(files)
    arrays: Any = tree_flatten(model.parameters())
    return {
        "format": FORMAT,
        "weights": weights_digest(files) if files else parameters_digest(model, arrays),
        "adapter": "none",
        "tokenizer": tokenizer.digest if tokenizer else "none",
        "cache": "; ".join(spec.signature for spec in specs),
        "block": str(block),
        # unpacked and packed weights of one file round differently, and so does another compute dtype
        "dtype": ", ".join(sorted({str(array.dtype) for _, array in arrays})),
    }


def parameters_digest(model: CausalLM, arrays: list) -> str:
    """Of a model that came from no file."""
    digest = hashlib.sha256(repr(model.config).encode())
    for name, array in arrays:
        digest.update(name.encode())
        digest.update(memoryview(mx.contiguous(array.reshape(-1).view(mx.uint8))))  # type: ignore[arg-type]
    return digest.hexdigest()


def identity_digest(identity: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def check_same(path: Path, saved: dict[str, str], here: dict[str, str]) -> None:
    for field, value in here.items():
        if saved.get(field) != value:
            raise BadSnapshot(
                f"{path} was saved with another {field} ({str(saved.get(field))[:60]!r}, here {value[:60]!r}); "
                "restore it with the model and settings it was made with"
            )
