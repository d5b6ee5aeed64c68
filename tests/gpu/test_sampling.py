"""Every sampling parameter through the engine on this device: the tokens that the reference draws from plain logits.

A token may differ only where moving the reference's own logits by rounding gives it too.
"""

import dataclasses
from functools import cache

import mlx.core as mx
import numpy as np
import pytest

from bench.gpu.shapes import open_gpu
from mlxrt import Engine, EngineConfig, Request, SamplingParams
from mlxrt.engine.sequence import Sequence
from mlxrt.kernels import PLAIN, Kernels
from tests.support import toy_models as toy
from tests.support.oracle import logits
from tests.support.state_machine.checker import draw_alone

VOCAB, REQUESTS, TOKENS = 20_011, 4, 12
ROUNDING = 2e-4
SETS = {
    "greedy": {},
    **{f"temperature {t}": {"temperature": t} for t in (1e-6, 0.3, 0.7, 1.0, 2.0)},
    **{f"top_k {k}": {"temperature": 0.9, "top_k": k} for k in (1, 2, 20, 40, 512, 513, VOCAB)},
    **{f"top_p {p}": {"temperature": 0.9, "top_p": p} for p in (1e-6, 0.1, 0.5, 0.9, 0.999999)},
    **{f"min_p {p}": {"temperature": 1.2, "min_p": p} for p in (0.001, 0.05, 1.0)},
    "top_k 20, top_p 0.95": {"temperature": 0.7, "top_k": 20, "top_p": 0.95},
    "top_k 64, min_p 0.02": {"temperature": 1.0, "top_k": 64, "min_p": 0.02},
    "top_k, top_p, min_p": {"temperature": 1.1, "top_k": 300, "top_p": 0.8, "min_p": 0.01},
    "repetition 1.3": {"repetition_penalty": 1.3},
    "repetition 0.8, drawn": {"repetition_penalty": 0.8, "temperature": 0.8},
    "presence 0.7": {"presence_penalty": 0.7},
    "frequency 0.4": {"frequency_penalty": 0.4},
    "presence and frequency, drawn": {"presence_penalty": -0.5, "frequency_penalty": 0.3, "temperature": 0.9},
    "bias": {"logit_bias": {3: 2.5, 9000: -4.0, VOCAB - 1: 1.5}},
    "bias, drawn": {"logit_bias": {3: 2.5, 77: 3.0}, "temperature": 0.9},
    "suppress": {"suppress": tuple(range(0, VOCAB, 2))},
    "suppress, drawn": {"suppress": tuple(range(0, VOCAB, 3)), "temperature": 0.9, "top_p": 0.9},
    "logprobs 5": {"logprobs": 5},
    "logprobs 20, drawn": {"logprobs": 20, "temperature": 0.7, "top_k": 40},
    "everything": {
        "temperature": 0.9, "top_k": 100, "top_p": 0.95, "min_p": 0.001, "repetition_penalty": 1.1,
        "presence_penalty": 0.2, "frequency_penalty": 0.1, "logit_bias": {5: 1.0}, "suppress": (6, 7), "logprobs": 3,
    },
}  # fmt: skip


@cache
def models():
    """For the engine and for the reference: the same weights."""
    config = dataclasses.replace(toy.CONFIG, vocab_size=VOCAB, num_hidden_layers=2, windows=(None,) * 2)
    made = []
    for kernels in (Kernels("auto", open_gpu()), PLAIN):
        mx.random.seed(5)
        made.append(toy.Toy(config))
        made[-1].fuse(kernels)
        mx.eval(made[-1].parameters())
    return made


def make_requests(params):
    prompts = [tuple((k * 733 + j * 31) % VOCAB for j in range(3 + 9 * k)) for k in range(REQUESTS)]
    return [
        Request(tokens=p, params=SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=100 + k, **params))
        for k, p in enumerate(prompts)
    ]


def compare(request, answer, name):
    """Every token and log probability of one answer; how many tokens rounding explains."""
    prompt, said = request.tokens, answer.tokens
    rows = np.array(logits(models()[1], (*prompt, *said[:-1])))[len(prompt) - 1 :]
    seq, ties = Sequence(0, request, prompt, frozenset(), request.params.seed), 0
    for i, (token, row) in enumerate(zip(said, rows, strict=True)):
        if token != draw_alone(seq, said[:i], row):
            noise = np.random.default_rng(0)
            moved = (row + noise.uniform(-ROUNDING, ROUNDING, row.shape).astype(np.float32) for _ in range(32))
            assert token in {draw_alone(seq, said[:i], r) for r in moved}, f"{name}: token {i} of {said}"
            ties += 1
        total = np.log(np.exp(row.astype(np.float64) - row.max()).sum()) + row.max()
        for id, p in answer.logprobs[i] if request.params.logprobs else ():
            assert abs(row[id] - total - p) < 10 * ROUNDING, f"{name}: log probability of {id} is {p}"
    return ties


@pytest.mark.parametrize("name", SETS)
def test_a_parameter_gives_the_tokens_of_the_reference(name, report):
    requests = make_requests(SETS[name])
    with Engine(models()[0], EngineConfig(chunk=64, prefix_cache=False)) as engine:
        ties = sum(compare(r, a, name) for r, a in zip(requests, engine.generate(requests), strict=True))
        assert engine.generate(requests[0]).tokens  # alone
    report(f"sampling, {name}: {REQUESTS * TOKENS} tokens of the reference, {ties} by rounding")


def test_all_parameters_in_one_batch():
    """A row depends on nothing of its neighbours."""
    requests = [make_requests(params)[i % REQUESTS] for i, params in enumerate(SETS.values())]
    with Engine(models()[0], EngineConfig(chunk=64, prefix_cache=False, max_running=64)) as engine:
        for request, answer, name in zip(requests, engine.generate(requests), SETS, strict=True):
            compare(request, answer, f"{name}, among others")
