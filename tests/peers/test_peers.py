"""The real default model against another engine and against itself. Skipped where its weights are not in the cache."""

import importlib.util
from itertools import zip_longest

import pytest

# isort: off
import mlxrt  # before MLX: it brings the BLAS
import mlx.core as mx
# isort: on

from mlxrt.bench.backend import Backend
from mlxrt.weights.source.alias import ALIASES

GGUF = ALIASES["smollm2"].path
MAX_GAP = 0.5  # logits
QUESTIONS = (
    "What is the capital of France? Answer in one sentence.",
    "List the first ten prime numbers.",
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about the sea.",
    "What is 12 times 12?",
    "What is photosynthesis?",
    "Translate into French: Good morning, my friend.",
    "Write a Python function that adds two numbers.",
    "Who wrote Romeo and Juliet, and when?",
    "What are the days of the week?",
)
TEXT = (
    "The harbour master counted the boats twice before he went home. Eleven had left at dawn and ten had returned, "
    "and the missing one belonged to his brother."
)

pytestmark = pytest.mark.skipif(not GGUF.exists(), reason=f"{GGUF} is not there; `mlxrt pull smollm2` fetches it")


@pytest.fixture(scope="module")
def engine():
    with mlxrt.load(str(GGUF), mlxrt.EngineConfig(offline=True)) as engine:
        yield engine


def check_difference(engine, prompt, ours, theirs):
    """None where the answers are equal, else (whether the difference is allowed, what it is).

    llama.cpp rounds activations to 8 bit, we compute in float32: its first other token must be our second choice and
    less than MAX_GAP logits below the first.
    """
    pairs = list(zip_longest(ours, theirs))
    index = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if index is None:
        return None
    a, b = pairs[index]
    if a is None or b is None:
        return False, f"one answer ends at {index} tokens, the other goes on with {b if a is None else a}"
    logits = engine.score([*prompt, *ours[:index]])[-1]
    second, first = mx.argsort(logits)[-2:].tolist()
    gap = (logits[first] - logits[b]).item()
    shown = engine.tokenizer.decode([a]), engine.tokenizer.decode([b])
    text = f"token {index}: ours {shown[0]!r}, llama.cpp {shown[1]!r}, our second choice {second}, gap {gap:.3f}"
    return (first, second) == (a, b) and gap < MAX_GAP, text


def compare_answers(engine, questions, max_tokens):
    """check_difference of every question's greedy answer, and our last answer's text."""
    prompts = [engine.encode(mlxrt.Request(messages=({"role": "user", "content": text},))) for text in questions]
    context, found = max(map(len, prompts)) + max_tokens + 1, []
    with Backend("llama.cpp", {"gguf": str(GGUF), "context": context, "threads": 1}) as peer:
        for prompt in prompts:
            theirs = peer.ask(do="generate", prompt=prompt, max_tokens=max_tokens, ends=True)["tokens"]
            done = engine.generate(list(prompt), max_tokens=max_tokens)
            found.append(check_difference(engine, prompt, list(done.tokens), theirs))
    return found, done.text


needs_llama_cpp = pytest.mark.skipif(
    importlib.util.find_spec("xllamacpp") is None, reason="pip install xllamacpp: llama.cpp is not here"
)


@needs_llama_cpp
def test_greedy_tokens_are_llama_cpps(engine):
    [difference], text = compare_answers(engine, QUESTIONS[:1], 8)
    assert difference is None, difference
    assert "Paris" in text


@pytest.mark.slow
@needs_llama_cpp
def test_greedy_tokens_of_many_prompts_are_llama_cpps(engine):
    found, _ = compare_answers(engine, QUESTIONS, 48)
    assert all(difference is None or difference[0] for difference in found), found
    assert found.count(None) >= 6, found


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
