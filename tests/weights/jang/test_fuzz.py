"""A short run over damaged checkpoints. The long one: python -m tests.long.fuzz_jang --count 1000 --seed N."""

from ...long.fuzz_jang import fuzz


def test_damaged_bundles_are_refused_or_answer_right():
    outcomes, bad = fuzz(count=40, number=3)
    assert not bad, "\n".join(bad)
    assert {outcome for _, outcome in outcomes} == {"ok", "refused"}
