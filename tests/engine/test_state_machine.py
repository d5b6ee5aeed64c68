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
COURT = Court(Counter())
pytestmark = pytest.mark.xdist_group("state machine")  # one process, for the test that counts what the others did


@pytest.mark.parametrize("kind", KINDS)
def test_programs(kind):
    @settings(
        max_examples=EACH, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(programs(kind, *poison_kinds((kind,)), longest=20))
    def each(program: Program) -> None:
        try_program(program, COURT)

    each()


def test_the_programs_did_something():
    """Runs after the others of this file; alone it has nothing to look at."""
    if len(COURT.checkers) < len(KINDS):
        pytest.skip("only some kinds ran")
    for event in ("tokens compared", "requests with cached tokens", "preemptions", "evictions", "restores", "forks"):
        assert COURT.tally[event], f"no {event}"
    assert COURT.tally["programs"] >= EACH * len(KINDS) and COURT.tally["ties"] < 5
    print(f"{COURT.tally['programs']} programs, {COURT.tally['tokens compared']} tokens compared")
