"""Draws and log probabilities in C: the reference's very tokens, whatever is asked; log probabilities of float64."""

import math
import random

import mlx.core as mx
import numpy as np
import pytest

from mlxrt.kernels import OPS, DrawRow, pack_rows
from mlxrt.kernels.cpu.library import CpuKernels
from mlxrt.kernels.ops.draw import draw

from ..support.kernels.cases import all_cases
from ..support.kernels.cpu_library import compiled_library

pytestmark = pytest.mark.xdist_group("cpu_kernels")  # one worker compiles the library

RECENTS = 8
SIZES = (3, 33, 100, 1000, 2049, 5000)


@pytest.fixture(scope="module")
def cpu() -> CpuKernels:
    return CpuKernels(compiled_library(), threads=2)


def assert_same(given, expected):
    assert len(given) == len(expected)
    for one, other in zip(given, expected):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert np.array_equal(np.array(one), np.array(other), equal_nan=True)


def make_logits(rng: random.Random, rows: int, vocab: int) -> np.ndarray:
    x = np.random.default_rng(rng.getrandbits(32)).normal(size=(rows, vocab)).astype(np.float32)
    x *= rng.choice([0.1, 1, 3, 30])
    match rng.randrange(8):
        case 0 | 1:
            x = np.round(x)
        case 2:
            x[rng.randrange(rows)] = 0
        case 3:
            x[0, rng.randrange(vocab)] = rng.choice([np.nan, np.inf, -np.nan])
        case 4:
            x[:, rng.randrange(vocab) :] = -np.inf
    return x


def make_row(rng: random.Random, vocab: int, history: bool) -> DrawRow:
    asked = {
        "temperature": rng.choice([0, 0.3, 0.7, 1, 2.5, 1e-9]),
        "top_k": rng.choice([0, 0, 1, 2, min(7, vocab - 1), min(40, vocab - 1), vocab - 1]),
        "top_p": rng.choice([1, 1, 0.9, 0.5, 0.01, 1e-12, 0.999999]),
        "min_p": rng.choice([0, 0, 0.05, 0.5, 1]),
        "seed": rng.getrandbits(64),
        "position": rng.randrange(1000),
    }
    if rng.random() < 0.5:
        tokens = [rng.randrange(vocab + 5) for _ in range(rng.randrange(20))]
        asked |= {"prompt": tokens, "output": [rng.randrange(vocab) for _ in range(rng.randrange(20))]}
        asked |= {"repetition_penalty": rng.choice([1, 1.3, 0.7]), "presence_penalty": rng.choice([0, 0.5, -1])}
        asked |= {"frequency_penalty": rng.choice([0, 0.7])}
    if rng.random() < 0.4:
        biased = [rng.randrange(vocab + 3) for _ in range(rng.randrange(6))]
        asked["bias"] = {token: rng.choice([1.5, -2, -math.inf, 100]) for token in biased}
    if history:
        asked["recent"] = rng.randrange(RECENTS)
    return DrawRow(**asked)


def make_call(rng: random.Random) -> dict[str, mx.array]:
    rows, vocab, history = rng.randint(1, 5), rng.choice(SIZES), rng.random() < 0.5
    numbers = np.random.default_rng(rng.getrandbits(32))
    arrays = {
        "x": mx.array(make_logits(rng, rows, vocab)),
        "rows": pack_rows([make_row(rng, vocab, history) for _ in range(rows)]),
        "offset": mx.array([rng.randrange(3)], mx.uint32),
    }
    if history:
        arrays["tokens"] = mx.array(numbers.integers(0, vocab, rows), mx.uint32)
        arrays["recent"] = mx.array(numbers.integers(0, vocab, (rows, RECENTS)), mx.uint32)
    if rng.random() < 0.4:
        arrays["mask"] = mx.array(numbers.integers(0, 2**32, (rows, -(-vocab // 32))), mx.uint32)
    return arrays


@pytest.mark.parametrize("seed", range(6))
def test_tokens_are_those_of_the_reference(cpu, seed):
    rng = random.Random(seed)
    for _ in range(40):
        arrays = make_call(rng)
        assert_same(cpu.draw(**arrays), draw.reference(**arrays))


def test_hard_cases_are_those_of_the_reference(cpu):
    """Shares that end among equal tokens, close logits, large vocabularies."""
    for case in all_cases(OPS["draw"], "float32"):
        assert_same(cpu.draw(**case.arguments()), draw.reference(**case.arguments()))


@pytest.mark.parametrize("vocab", SIZES)
def test_log_probabilities_are_those_of_float64(cpu, vocab):
    rng = np.random.default_rng(vocab)
    x = rng.normal(size=(3, vocab)).astype(np.float32) * np.array([[0.1], [3], [30]], np.float32)
    x[1] = np.round(x[1])
    chosen, n = rng.integers(0, vocab, 3), min(20, vocab)
    status = np.stack([chosen, [0, 1, 0]], axis=1).astype(np.uint32)
    result, logprobs = (np.array(a) for a in cpu.top_logprobs(mx.array(x), mx.array(status), n))
    exact = x.astype(np.float64)
    exact -= np.log(np.exp(exact - exact.max(1, keepdims=True)).sum(1, keepdims=True)) + exact.max(1, keepdims=True)
    best = np.argsort(-exact, axis=1, kind="stable")[:, :n]
    assert np.array_equal(result[:, :2], status) and np.array_equal(result[:, 2:], best)
    named = np.concatenate([chosen[:, None], best], axis=1)
    assert np.abs(logprobs - np.take_along_axis(exact, named, 1)).max() < 2e-5
