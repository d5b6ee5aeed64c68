"""A row's token is its own: the same alone, in any batch and in any order; seeds, positions, the draw itself."""

import math

import mlx.core as mx
import numpy as np
import pytest

from mlxrt.engine.logits import LogitsView
from mlxrt.engine.request import SamplingParams
from mlxrt.engine.sampler import check_params, draw_seed, sample
from mlxrt.errors import BadRequest
from mlxrt.kernels import DrawRow, pack_rows
from mlxrt.kernels.ops import draw as draw_op
from mlxrt.kernels.ops.draw import random_bits


def any_params(rng) -> dict:
    return {
        "temperature": float(rng.choice([0.0, 0.3, 1.0, 2.5])),
        "top_k": int(rng.choice([0, 0, 1, 20, 64])),
        "top_p": float(rng.choice([1.0, 1.0, 0.9, 0.4])),
        "min_p": float(rng.choice([0.0, 0.0, 0.05])),
        "repetition_penalty": float(rng.choice([1.0, 1.0, 1.3])),
        "frequency_penalty": float(rng.choice([0.0, 0.4])),
        "logit_bias": {3: 1.5} if rng.random() < 0.3 else {},
        "suppress": (2, 9) if rng.random() < 0.3 else (),
        "logprobs": int(rng.choice([0, 0, 4])),
    }


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_row_alone_equals_the_row_in_random_batches(sequence, dtype):
    rng, n, vocab = np.random.default_rng(8), 24, 1111
    x = mx.array((rng.normal(size=(n, vocab)) * 3).astype(np.float32)).astype(dtype)
    seqs = [
        sequence(
            id=i,
            prompt=rng.integers(0, vocab, 5).tolist(),
            output=rng.integers(0, vocab, i % 4).tolist(),
            seed=i,
            **any_params(rng),
        )
        for i in range(n)
    ]

    def run(rows):
        with LogitsView(x[mx.array(rows)], [seqs[i] for i in rows]) as view:
            result = sample(view)
            tokens = result.tokens.tolist()
            return {i: (t, result.read(g, t)) for g, (i, t) in enumerate(zip(rows, tokens))}

    alone = {i: run([i])[i] for i in range(n)}
    assert len({t for t, _ in alone.values()}) > n // 2
    for _ in range(12):
        rows = rng.permutation(n)[: rng.integers(2, n + 1)].tolist()
        assert run(rows) == {i: alone[i] for i in rows}


def test_greedy_is_the_argmax_in_the_models_dtype_and_makes_no_float32_copy(sequence):
    x = mx.array(np.random.default_rng(1).normal(size=(3, 70)).astype(np.float32)).astype(mx.bfloat16)
    with LogitsView(x, [sequence() for _ in range(3)]) as view:
        assert sample(view).tokens.tolist() == mx.argmax(x, axis=-1).tolist()
        assert view.latest is x


def test_a_step_without_rows_samples_nothing():
    with LogitsView(mx.zeros((0, 70)), []) as view:
        result = sample(view)
        assert (result.tokens.tolist(), result.failures()) == ([], {})


def test_equal_logits_greedy_takes_the_lowest_id(sequence, tokens_of):
    assert tokens_of(np.float32([[1, 4, 4, 4]]), [sequence()]) == [1]


def test_position_counts_known_and_pending_output(sequence, tokens_of):
    x = np.zeros((1, 5000), np.float32)
    first = tokens_of(x, [sequence(temperature=1.0, seed=5)])
    second = tokens_of(x, [sequence(temperature=1.0, seed=5, output=(7,))])
    late = sequence(temperature=1.0, seed=5)
    late.pending = [(mx.array([7], mx.uint32), 0)]
    assert first != second == tokens_of(x, [late])
    assert second == tokens_of(x, [sequence(prompt=(4, 4, 4), temperature=1.0, seed=5, output=(8,))])


def bits_of(seed: int, position: int) -> int:
    return random_bits(pack_rows([DrawRow(1.0, seed=seed, position=position)]), mx.zeros((1,), mx.uint32)).item()


def test_random_numbers_are_philox_and_do_not_repeat():
    """The published first answer for a key and counter of zeros, and no number shared by near seeds or positions."""
    assert bits_of(0, 0) == 0xE169C58D_6627E8D5
    seen = [bits_of(seed, position) for seed in (0, 1, 2, 2**32, 2**32 + 1, 2**64 - 1) for position in range(20)]
    assert len(set(seen)) == len(seen) and abs(np.mean(seen) / 2**64 - 0.5) < 0.1


@pytest.mark.parametrize("bits", [0, 2**64 - 1])
def test_a_draw_at_the_edges_never_takes_an_id_without_weight(bits, monkeypatch):
    monkeypatch.setattr(draw_op, "random_bits", lambda *_: mx.array(np.array([[bits]], np.uint64)))
    x = np.full(2000, -np.inf, np.float32)
    x[[700, 1100]] = [-17.0, 3.0]
    made = draw_op.draw.reference(mx.array(x)[None], pack_rows([DrawRow(1.0)]), mx.zeros((1,), mx.uint32))
    assert made[0].item() == (700 if bits == 0 else 1100)


def test_draws_follow_the_softmax_over_a_large_vocabulary(sequence, tokens_of):
    """2,000 positions of one seed, vocabulary 8,000: counts in 40 bins of like mass, chi-square within 5 sigma."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=8_000).astype(np.float32)
    prob = np.exp(x.astype(np.float64) / 0.8 - (x.max() / 0.8))
    prob /= prob.sum()
    n, got = 2000, []
    for start in range(0, n, 100):
        seqs = [sequence(output=(0,) * (start + j), seed=42, temperature=0.8) for j in range(100)]
        got += tokens_of(np.broadcast_to(x, (100, 8_000)), seqs)
    where = np.minimum((np.cumsum(prob) - prob) * 40, 39.999).astype(int)
    mass = np.bincount(where, prob, 40)
    counts = np.bincount(where[got], minlength=40)
    chi = ((counts - n * mass) ** 2 / (n * mass)).sum()
    assert abs(chi - 39) < 5 * math.sqrt(2 * 39)


def test_the_smallest_temperature_is_greedy_and_finite(sequence, tokens_of):
    x = np.random.default_rng(6).normal(size=(1, 300)).astype(np.float32) * 50
    for temperature in (5e-324, 1e-30, 1e-4):
        assert tokens_of(x, [sequence(temperature=temperature)]) == [x.argmax()]


def test_ids_outside_the_vocabulary_are_refused_at_submission():
    check_params(SamplingParams(suppress=(9,), logit_bias={9: 1.0}, stop_token_ids=(9,), logprobs=10, top_k=99), 10)
    for bad in ({"suppress": (3, 10)}, {"logit_bias": {10: 1.0}}, {"stop_token_ids": (11,)}):
        with pytest.raises(BadRequest, match=rf"{next(iter(bad))} names token 1\d, the vocabulary is 0\.\.9"):
            check_params(SamplingParams(**bad), 10)
    with pytest.raises(BadRequest, match="logprobs asks for 11"):
        check_params(SamplingParams(logprobs=11), 10)
    with pytest.raises(BadRequest, match="suppress names all 10"):
        check_params(SamplingParams(suppress=tuple(range(10))), 10)


def test_drawn_seeds_are_valid_and_differ():
    seeds = {draw_seed() for _ in range(50)}
    assert len(seeds) == 50
    assert all(SamplingParams(seed=s).seed == s for s in seeds)
