"""The draw op: its distribution, its mask, and that neither the batch nor the way it is computed changes a token."""

import math

import mlx.core as mx
import numpy as np
import pytest

from mlxrt.kernels import DrawPlan, DrawRow, draw, make_gpu, pack_rows

from ...long.check_draws import check_set, find_probabilities, list_sets, make_logits
from ...support.chi_square import p_value
from ...support.metal_sim import Simulator

NOW = mx.zeros((1,), mx.uint32)
KINDS = [
    {"temperature": 1.0, **p} for p in ({}, {"top_k": 9}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 300, "top_p": 0.9})
]


@pytest.mark.parametrize("number", range(2, 35, 7))
def test_draws_follow_their_distribution(number):
    """A part of what `python -m tests.long.check_draws` checks."""
    kind, row = list_sets()[number]
    assert check_set(kind, row, 2000, 150) > 1e-4, row


def test_a_wrong_distribution_is_noticed():
    x, rng = make_logits("normal", 150), np.random.default_rng(0)
    right, other = (find_probabilities(x, DrawRow(t)) for t in (1.0, 1.15))
    counts = np.bincount(rng.choice(150, 2000, p=other), minlength=150)
    assert p_value(counts, right) < 1e-4 < p_value(counts, other)


def test_kernels_give_the_same_tokens_in_batches_of_any_size():
    """As the reference does, computed for what each row asks for."""
    rows = [DrawRow(**KINDS[i % 5], seed=i, position=2 * i) for i in range(10)]
    x = mx.array(np.random.default_rng(1).normal(size=(10, 2100)).astype(np.float32) * 2)
    gpu = make_gpu("metal", Simulator(checked=False).metal_kernel)
    whole = draw.launch(gpu, x, pack_rows(rows), NOW)[0].tolist()
    for size in (1, 4):
        parts = [(x[i : i + size], rows[i : i + size]) for i in range(0, 10, size)]
        assert whole == [t for a, own in parts for t in draw.launch(gpu, a, pack_rows(own), NOW)[0].tolist()]
        assert whole == [
            t
            for a, own in parts
            for t in draw.reference(a, pack_rows(own), NOW, plan=DrawPlan.of(own, 2100))[0].tolist()
        ]


def test_a_mask_bans_as_minus_infinity_does():
    rng = np.random.default_rng(5)
    allowed = rng.random((5, 70)) < 0.3
    bits = np.zeros((5, 3), np.uint32)
    for i, token in zip(*np.nonzero(allowed)):
        bits[i, token // 32] |= np.uint32(1 << (token % 32))
    x, rows = mx.array(rng.normal(size=(5, 70)).astype(np.float32)), pack_rows([DrawRow(**p, seed=3) for p in KINDS])
    masked = draw.reference(x, rows, NOW, mask=mx.array(bits))
    banned = draw.reference(mx.where(mx.array(allowed), x, -math.inf), rows, NOW)
    assert all(mx.array_equal(a, b) for a, b in zip(masked, banned))
    assert allowed[np.arange(5), np.array(masked[0])].all()
    none = draw.reference(x, rows, NOW, mask=mx.zeros((5, 3), mx.uint32))[1]
    assert none.tolist() == [[0, 1]] * 5


def test_tokens_since_the_rows_were_packed_count_at_their_step():
    """`recent` has the steps before, `tokens` the newest; a random number and a penalty for every step."""
    x = mx.zeros((1, 40))
    row = DrawRow(1.0, seed=6, position=4, frequency_penalty=1.0, output=(7, 8))
    recent, tokens = mx.zeros((1, 4), mx.uint32), [9, 9, 11]
    for step, token in enumerate([0, *tokens]):
        made = draw.reference(
            x, pack_rows([row]), mx.array([step], mx.uint32), tokens=mx.array([token], mx.uint32), recent=recent
        )
        later = DrawRow(1.0, seed=6, position=4 + step, frequency_penalty=1.0, output=(7, 8, *tokens[:step]))
        expected = draw.reference(x, pack_rows([later]), NOW)
        assert mx.array_equal(made[2], expected[2]) and made[0].item() == expected[0].item()
        recent = made[3]
    assert recent.tolist() == [[9, 9, 11, 0]]
