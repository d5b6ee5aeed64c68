"""Random programs of everything an engine can be asked to do; every token is that of a fresh one-shot run.

The long version is `python -m tests.long.state_machine --programs 3000`; `python -m tests.long.planted_faults` shows
that planted faults are caught.
"""

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings

from ..support.state_machine.kinds import KINDS, poison_kinds
from ..support.state_machine.program import Program, programs
from ..support.state_machine.shrink import Court, try_program

EACH = 7  # programs of a kind
HAPPEN = ("tokens compared", "requests with cached tokens", "evictions")  # with every kind


@pytest.mark.parametrize("kind", KINDS)
def test_programs(kind):
    court = Court(Counter())

    @settings(
        max_examples=EACH, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(programs(kind, *poison_kinds((kind,), "float32"), longest=20))
    def each(program: Program) -> None:
        try_program(program, court)

    each()
    assert not [event for event in HAPPEN if not court.tally[event]], "the programs do too little"
    assert court.tally["programs"] >= EACH and court.tally["ties"] < 5
