"""Answers are compared token by token: wrong ones are caught, rounding differences are not wrong."""

import pytest

from mlxrt.bench.tokens import Agreement, first_difference, loop_period, token_hash


def test_hash_depends_on_every_token_and_its_position():
    whole = token_hash([1, 2, 3])
    assert whole == token_hash((1, 2, 3))
    assert len({whole, token_hash([1, 3, 2]), token_hash([12, 3]), token_hash([1, 2]), token_hash([])}) == 5


@pytest.mark.parametrize(
    ("a", "b", "index"), [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2, 3], [1, 2], 2), ([], [5], 0)]
)
def test_first_difference(a, b, index):
    assert first_difference(a, b) == index


@pytest.mark.parametrize("changed", range(6))
def test_one_changed_token_is_caught(changed):
    ours = [5, 9, 2, 7, 7, 1]
    theirs = [t + (i == changed) for i, t in enumerate(ours)]
    found = Agreement()
    asked = []
    found.record("peer", [1], theirs)
    found.compare("peer", [1, 2], ours, theirs, 0.01, lambda prompt, pair: asked.append((prompt, pair)) or 3.0)
    [d] = found.wrong
    assert (d.index, d.ours, d.theirs, d.gap) == (changed, ours[changed], theirs[changed], 3.0)
    assert asked == [([1, 2, *ours[:changed]], [ours[changed], theirs[changed]])]
    assert found.equal["peer"] == 0 and found.compared["peer"] == 1


def test_a_rounding_is_no_wrong_answer():
    found = Agreement()
    found.compare("peer", [1], [5, 6], [5, 7], 0.01, lambda prompt, pair: 0.004)
    assert found.differences and not found.wrong


def test_an_answer_that_ends_early_is_wrong():
    found = Agreement()
    found.compare("peer", [1], [5, 6], [5], 0.01, lambda prompt, pair: 0.0)
    assert found.wrong[0].theirs == -1


def test_two_answers_to_one_prompt_are_remarked():
    found = Agreement()
    for tokens in ([4, 5, 6], [4, 5, 6], [4, 5, 7]):
        found.record("peer", [1], tokens)
    found.record("peer", [2], [9, 9, 1])
    assert len(found.remarks) == 1 and "two answers" in found.remarks[0]


@pytest.mark.parametrize(
    ("tokens", "period"),
    [
        ([3] * 20, 1),
        ([1, 2] * 10, 2),
        ([9, 8, 7, 1, 2, 3] * 2 + [1, 2, 3] * 8, 3),
        (list(range(20)), None),
        ([1, 1], None),
    ],
)
def test_repetition_loops(tokens, period):
    assert loop_period(tokens) == period
