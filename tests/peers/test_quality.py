"""Perplexity and KL divergence of the default model on Moby-Dick, within limits: against llama.cpp's perplexity, for
every KV cache kind, and for every weight format our own writers make.

Windows of 512 tokens without BOS; only each window's second half counts, so that every target has context.
"""

import math

import pytest

# isort: off
import mlxrt  # before MLX: it brings the BLAS
import mlx.core as mx
# isort: on

from mlxrt.bench.corpus import read_corpus
from mlxrt.cli.convert import SAMPLE
from mlxrt.engine.load import open_checkpoint
from mlxrt.weights.convert.calibration import calibrate
from mlxrt.weights.convert.convert import convert
from mlxrt.weights.convert.recipe import Recipe
from mlxrt.weights.source.alias import ALIASES
from mlxrt.weights.source.resolve import resolve

MODEL = "smollm2"
GGUF = ALIASES[MODEL].path
WINDOW, WINDOWS = 512, 4
FIRST_TARGET = WINDOW // 2 + 1
CHARACTERS = 20_000  # more than WINDOW * WINDOWS tokens of English
LLAMA_CPP = 46.34  # perplexity of build 0.3.36 on the same GGUF, windows and targets

# KV cache kind: largest mean KL in nats, smallest share of positions with the same likeliest token
KV_LIMITS = {"q8": (0.002, 0.97), "q6": (0.02, 0.92), "k8v4": (0.03, 0.92), "q4": (0.3, 0.75)}
KV_WINDOW, KV_WINDOWS, KV_FIRST = 1024, 4, 64

# The widths of JANG_4M, through plain MLX affine: what the profile is compared with.
SAME_WIDTHS = ((r"\.[qkvo]_proj\.|lm_head", {"bits": 8}), (r".", {"bits": 4}))
FORMATS = {
    "affine 4": Recipe("mlx", bits=4),
    "affine, widths of JANG_4M": Recipe("mlx", rules=SAME_WIDTHS),
    "affine 2 in the MLPs, 8 elsewhere": Recipe("mlx", rules=((r"\.mlp\.", {"bits": 2}), (r".", {"bits": 8}))),
    "JANG_4M": Recipe("jang", profile="JANG_4M"),
    "JANGTQ4": Recipe("jangtq", profile="JANGTQ4"),
    "codebook": Recipe("codebook", codebook_size=256, length=4),  # 2 bits a weight, as its neighbours
}
# format -> (what it is compared with, the largest ratio of perplexities)
FORMAT_LIMITS = {
    "JANG_4M": ("affine, widths of JANG_4M", 1.03),
    "JANGTQ4": ("affine 4", 1.12),
    "codebook": ("affine 2 in the MLPs, 8 elsewhere", 1.0),
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.network,
    pytest.mark.skipif(not GGUF.exists(), reason=f"{GGUF} is not there; `mlxrt pull smollm2` fetches it"),
]


@pytest.fixture(scope="module")
def tokens():
    with mlxrt.load(MODEL) as engine:
        return engine.tokenizer.encode(read_corpus()[: 8 * KV_WINDOW * KV_WINDOWS], special=False)


def windows(engine):
    tokens = engine.tokenizer.encode(read_corpus()[:CHARACTERS], special=False)
    assert len(tokens) >= WINDOW * WINDOWS
    return [tokens[i * WINDOW : (i + 1) * WINDOW] for i in range(WINDOWS)]


def log_probabilities(engine, tokens, first):
    logits = engine.score(tokens)[first:]
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def perplexity(engine):
    losses = []
    for window in windows(engine):
        rows = log_probabilities(engine, window, FIRST_TARGET - 1)[:-1]
        chosen = mx.take_along_axis(rows, mx.array(window[FIRST_TARGET:])[:, None], axis=-1)[:, 0]
        losses += (-chosen).tolist()
    return math.exp(math.fsum(losses) / len(losses))


def test_perplexity_is_llama_cpps():
    with mlxrt.load(MODEL) as engine:
        found = perplexity(engine)
    assert abs(found / LLAMA_CPP - 1) <= 0.002, found


@pytest.fixture(scope="module")
def full_precision(tokens):
    return score_windows("full", tokens)


def score_windows(kind, tokens):
    with mlxrt.load(MODEL, config=mlxrt.EngineConfig(kv=kind)) as engine:
        cut = [tokens[i * KV_WINDOW : (i + 1) * KV_WINDOW] for i in range(KV_WINDOWS)]
        rows = [log_probabilities(engine, window, KV_FIRST) for window in cut]
        mx.eval(rows)
    return rows


@pytest.mark.parametrize("kind", KV_LIMITS)
def test_kv_cache_kinds_stay_near_full_precision(kind, tokens, full_precision):
    max_kl, min_same = KV_LIMITS[kind]
    pairs = list(zip(full_precision, score_windows(kind, tokens), strict=True))
    kl = mx.concatenate([(mx.exp(a) * (a - b)).sum(axis=-1) for a, b in pairs]).mean().item()
    same = mx.concatenate([a.argmax(axis=-1) == b.argmax(axis=-1) for a, b in pairs]).mean().item()
    assert kl <= max_kl and same >= min_same, (kl, same)


@pytest.fixture(scope="module")
def counts():
    with mlxrt.load(MODEL, mlxrt.EngineConfig(kernels="reference")) as engine:
        return calibrate(engine.model, engine.score, engine.tokenizer.encode(SAMPLE))


@pytest.mark.parametrize("name", FORMAT_LIMITS)
def test_weight_formats_keep_their_perplexity(name, counts, tmp_path):
    other, limit = FORMAT_LIMITS[name]
    found = {}
    for number, each in enumerate((name, other)):
        convert(open_checkpoint(resolve(MODEL)), tmp_path / str(number), FORMATS[each], calibrate=lambda: counts)
        with mlxrt.load(str(tmp_path / str(number))) as engine:
            found[each] = perplexity(engine)
    assert found[name] / found[other] <= limit, found
