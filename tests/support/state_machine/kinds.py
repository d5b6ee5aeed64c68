"""The models that programs run on: every toy model, with no more layers than its pattern needs.

They speak the byte tokenizer of the CLI's tests, so that sessions work. Made once per process: nothing changes them.
"""

import dataclasses
import random
import tempfile
from functools import cache
from pathlib import Path

import mlx.core as mx

from mlxrt.cache.memory import QuantizedKV, Shared
from mlxrt.kernels import PLAIN, Kernels, backend, make_gpu
from mlxrt.text import Tokenizer
from mlxrt.weights.source.cache_dir import cache_root
from tests.cli.conftest import write_tokenizer
from tests.support import toy_models as toy

VOCAB = 258  # the byte tokenizer's
KINDS = tuple(toy.KINDS)


@cache
def model(kind: str) -> toy.Toy:
    """Computed by plain MLX: the oracle's."""
    return make_model(kind, PLAIN)


@cache
def engine_model(kind: str) -> toy.Toy:
    """The same weights, computed by the kernels of this machine."""
    gpu = make_gpu(backend(), folder=cache_root() / "kernels")
    return model(kind) if gpu is None else make_model(kind, Kernels("auto", gpu))


def make_model(kind: str, kernels: Kernels) -> toy.Toy:
    pattern = type(toy.KINDS[kind]())
    layers = max(2, len(pattern.kinds))  # two at least: a group of one layer cannot be forgotten in part
    config = dataclasses.replace(
        toy.CONFIG, vocab_size=VOCAB, num_hidden_layers=layers, windows=(None,) * layers, max_position_embeddings=512
    )
    mx.random.seed(1)
    made = pattern(config)
    made.fuse(kernels)
    mx.eval(made.parameters())
    return made


@cache
def tokenizer() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        return Tokenizer.from_folder(Path(folder))


def is_quantised(kind: str) -> bool:
    return isinstance(model(kind).codec, QuantizedKV)


def memory_for(kind: str, tokens: int) -> int:
    """Bytes in which about so many tokens fit, all sequences and stored prefixes together."""
    specs = [s for s in model(kind).cache_specs() if not isinstance(s, Shared)]
    sizes = [s.size for s in specs if s.paged]
    # A step of a recurrent layer takes a place for every checkpoint it passes, and the step before pins its own.
    blocks = max(tokens // sizes[0], 6) if sizes else max(tokens // 4, 24)
    return blocks * sum(s.nbytes() for s in specs)


@cache
def stems() -> tuple[tuple[int, ...], ...]:
    """What many prompts begin with."""
    rng = random.Random(4)
    return tuple(tuple(rng.randrange(256) for _ in range(n)) for n in (7, 18, 37))
