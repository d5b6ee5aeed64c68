"""A few of the random loads of `python -m tests.long.scheduler`, of every kind."""

from collections import Counter

import pytest

from tests.support.state_machine.checker import Checker
from tests.support.state_machine.kinds import KINDS, poison_kinds

from ..support.scheduler_load.play import Play
from ..support.scheduler_load.program import make

EACH = 2


@pytest.mark.parametrize("kind", KINDS)
def test_random_loads(kind):
    tally: Counter = Counter()
    variants = [kind, kind, *poison_kinds((kind,))]  # plain memory, and poisoned memory in both dtypes
    checkers = {variant: Checker(variant, tally) for variant in variants}
    for seed in range(EACH):
        program = make(seed, variants[seed])
        try:
            Play(program, checkers[program.kind]).run()
        except AssertionError as error:
            error.add_note(str(program))
            raise
    assert tally["programs"] == EACH and tally["tokens compared"] > 25 and tally["ties"] < 5
