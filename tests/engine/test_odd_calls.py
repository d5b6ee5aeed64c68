"""The public API with odd arguments (a long run: tests/long/odd_calls.py)."""

from tests.support.odd_calls import play


def test_odd_arguments_give_typed_errors_and_leave_the_engine_answering():
    tally, wrong = play(iter([3]), 120)
    assert not wrong, "\n".join(wrong)
    assert tally["calls"] == 120 and tally["refused"] > 40 and tally["accepted"] > 5
