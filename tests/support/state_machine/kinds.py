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
from mlxrt.text.grammar import GrammarCompiler
from mlxrt.weights.source.cache_dir import cache_root
from tests.cli.conftest import write_tokenizer
from tests.support import toy_models as toy

VOCAB = 258  # the byte tokenizer's
KINDS = tuple(toy.KINDS)
POISON = ":poison"  # after a kind: memory that nobody owns is NaN, and a token overflows
HALF = ":float16"  # and in that dtype, perhaps
OVERFLOW = 251  # the token


def is_poisoned(kind: str) -> bool:
    return POISON in kind


def poison_kinds(kinds: tuple[str, ...], dtype: str | None = None) -> tuple[str, ...]:
    """Each of them with poisoned memory, in float32 and in float16, or in one of them."""
    suffixes = {"float32": POISON, "float16": POISON + HALF}
    return tuple(kind + suffixes[name] for name in ([dtype] if dtype else suffixes) for kind in kinds)


def dtype_of(kind: str) -> mx.Dtype:
    return mx.float16 if kind.endswith(HALF) else mx.float32


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
    pattern = type(toy.KINDS[kind.split(":")[0]]())
    layers = max(2, len(pattern.kinds))  # two at least: a group of one layer cannot be forgotten in part
    config = dataclasses.replace(
        toy.CONFIG, vocab_size=VOCAB, num_hidden_layers=layers, windows=(None,) * layers, max_position_embeddings=512
    )
    mx.random.seed(1)
    dtype = dtype_of(kind)
    if pattern.codec is not None:
        pattern.codec = dataclasses.replace(pattern.codec, dtype=dtype)
    made = pattern(config)
    made.set_dtype(dtype)
    if is_poisoned(kind):
        let_token_overflow(made)
    made.fuse(kernels)
    mx.eval(made.parameters())
    return made


def let_token_overflow(made: toy.Toy) -> None:
    """Let the first MLP overflow for one token and no other, with finite weights: element 0 of the hidden state is that
    token's alone."""
    stack = made.model
    rows = stack.embed_tokens.weight
    rows[:, 0] = 0
    rows[OVERFLOW] = 0
    rows[OVERFLOW, 0] = 1000  # whatever a layer adds to it
    for layer in stack.layers:
        mixer = layer.self_attn
        for into in (mixer.proj if "proj" in mixer else mixer.o_proj, layer.mlp.down_proj):
            into.weight[0] = 0
    most = 3e38 if made.dtype == mx.float32 else 6e4
    stack.layers[0].mlp.up_proj.weight[:, 0] = most


@cache
def tokenizer() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        return Tokenizer.from_folder(Path(folder))


@cache
def grammars() -> GrammarCompiler:
    """The oracle's own."""
    return GrammarCompiler(tokenizer(), VOCAB, frozenset())


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
