"""A few of the random loads of `python -m tests.long.scheduler`, of every kind."""

from collections import Counter

import pytest

from tests.support.state_machine.checker import Checker
from tests.support.state_machine.kinds import KINDS

from ..support.scheduler_load.play import Play
from ..support.scheduler_load.program import make

EACH = 4


@pytest.mark.parametrize("kind", KINDS)
def test_random_loads(kind):
    tally: Counter = Counter()
    checker = Checker(kind, tally)
    for seed in range(EACH):
        program = make(seed, kind)
        try:
            Play(program, checker).run()
        except AssertionError as error:
            error.add_note(str(program))
            raise
    assert tally["programs"] == EACH and tally["tokens compared"] > 50 and tally["ties"] < 5
