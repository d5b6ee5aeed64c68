"""The real default model against another engine and against itself. Skipped where its weights are not in the cache."""

import importlib.util

import pytest

# isort: off
import mlxrt  # before MLX: it brings the BLAS
import mlx.core as mx
# isort: on

from bench.peer_tokens import compare
from mlxrt.bench.side import Side
from mlxrt.weights.source.alias import ALIASES

GGUF = ALIASES["smollm2"].path
TEXT = (
    "The harbour master counted the boats twice before he went home. Eleven had left at dawn and ten had returned, "
    "and the missing one belonged to his brother."
)

pytestmark = pytest.mark.skipif(not GGUF.exists(), reason=f"{GGUF} is not there; `mlxrt pull smollm2` fetches it")


@pytest.fixture(scope="module")
def engine():
    with mlxrt.load(str(GGUF), mlxrt.EngineConfig(offline=True)) as engine:
        yield engine


@pytest.mark.skipif(
    importlib.util.find_spec("xllamacpp") is None, reason="pip install xllamacpp: llama.cpp is not here"
)
def test_greedy_tokens_are_llama_cpps(engine):
    messages = ({"role": "user", "content": "What is the capital of France? Answer in one sentence."},)
    prompt = engine.encode(mlxrt.Request(messages=messages))
    with Side("llama.cpp", {"gguf": str(GGUF), "context": len(prompt) + 9, "threads": 1}) as peer:
        theirs = peer.ask(do="generate", prompt=prompt, max_tokens=8, ends=True)["tokens"]
    done = engine.generate(list(prompt), max_tokens=8)
    verdict = compare(engine, prompt, list(done.tokens), theirs)
    assert verdict.whole, verdict.remark
    assert "Paris" in done.text


@pytest.fixture(scope="module")
def tokens(engine):
    return engine.tokenizer.encode(TEXT, special=False)


@pytest.fixture(scope="module")
def whole(engine, tokens):
    return engine.score(tokens, 512)


@pytest.mark.parametrize("chunk", [16, 7])
def test_logits_do_not_depend_on_chunking(engine, tokens, whole, chunk):
    assert len(tokens) > chunk
    parts = engine.score(tokens, chunk)
    assert whole.dtype == parts.dtype == mx.float32
    assert whole.shape == parts.shape == (len(tokens), engine.model.config.vocab_size)
    assert mx.abs(whole - parts).max().item() < 1e-3
    assert mx.abs(whole).max().item() > 1  # zeros would agree too


def test_english_is_likelier_than_its_words_reversed(engine, tokens, whole):
    back = engine.tokenizer.encode(" ".join(reversed(TEXT.split())), special=False)
    assert mean_loss(whole, tokens) + 1 < mean_loss(engine.score(back), back)


def mean_loss(logits, tokens):
    chosen = mx.take_along_axis(logits[:-1], mx.array(tokens[1:])[:, None], axis=-1)[:, 0]
    return (mx.logsumexp(logits[:-1], axis=-1) - chosen).mean().item()
