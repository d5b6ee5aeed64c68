"""The real default model against another engine and against itself. Skipped where its weights are not in the cache."""

import importlib.util

import mlx.core as mx
import pytest

import mlxrt
from bench.peer_tokens import compare
from bench.workers import Side
from mlxrt.weights.alias import ALIASES

GGUF = ALIASES["smollm2"].path
TEXT = (
    "The harbour master counted the boats twice before he went home. Eleven had left at dawn and ten had returned, "
    "and the missing one belonged to his brother. He lit the lamp at the end of the pier, although the rules said "
    "that no lamp was to burn after midnight, and sat down beside it with a blanket and a flask of tea."
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
    with Side("llama_cpp", str(GGUF), "1", str(len(prompt) + 9)) as peer:
        theirs = peer.ask(prompt=prompt, max_tokens=8)
    done = engine.generate(list(prompt), max_tokens=8)
    verdict = compare(engine, prompt, list(done.tokens), theirs)
    assert verdict.whole, verdict.remark
    assert "Paris" in done.text


@pytest.mark.parametrize("chunk", [64, 7])
def test_logits_do_not_depend_on_chunking(engine, chunk):
    tokens = engine.tokenizer.encode(TEXT, special=False)
    assert len(tokens) > chunk
    whole, parts = engine.score(tokens, 512), engine.score(tokens, chunk)
    assert whole.dtype == parts.dtype == mx.float32
    assert whole.shape == parts.shape == (len(tokens), engine.model.config.vocab_size)
    assert mx.abs(whole - parts).max().item() < 1e-3
    assert mx.abs(whole).max().item() > 1  # zeros would agree too


def test_model_finds_english_likelier_than_its_words_reversed(engine):
    tokens = engine.tokenizer.encode(TEXT, special=False)
    back = engine.tokenizer.encode(" ".join(reversed(TEXT.split())), special=False)
    assert mean_loss(engine, tokens) + 1 < mean_loss(engine, back)


def mean_loss(engine, tokens):
    logits = engine.score(tokens)[:-1]
    chosen = mx.take_along_axis(logits, mx.array(tokens[1:])[:, None], axis=-1)[:, 0]
    return (mx.logsumexp(logits, axis=-1) - chosen).mean().item()
