"""The three protocols of check_parity.py again, on GGUF files written from the fixtures as llama.cpp's converter would.

    python ../shared/tools/parity/check_parity.py ../shared/fixtures/parity tests.gguf_parity_adapter:logits \
        --stepper tests.gguf_parity_adapter:Stepper --batch tests.gguf_parity_adapter:batch
"""

import tempfile
from functools import lru_cache
from pathlib import Path

# isort: off
import mlxrt  # noqa: F401  before MLX: it brings the BLAS
from tests import parity_adapter

# isort: on
from tests.support.llama_cpp_files import convert

KEPT = tempfile.TemporaryDirectory(prefix="mlxrt-gguf-")


@lru_cache(maxsize=2)
def written(path: str, stamp: int) -> Path:
    return convert(Path(path), Path(KEPT.name) / f"{Path(path).name}-{stamp}.gguf")


def as_gguf(path) -> Path:
    return written(str(path), (Path(path) / "config.json").stat().st_mtime_ns)


def logits(path, tokens):
    return parity_adapter.logits(as_gguf(path), tokens)


def batch(path, prompts, n):
    return parity_adapter.batch(as_gguf(path), prompts, n)


class Stepper(parity_adapter.Stepper):
    def __init__(self, path):
        super().__init__(as_gguf(path))
