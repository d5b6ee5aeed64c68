"""Random programs of everything an engine can be asked to do; every token is that of a fresh one-shot run.

The long version is `python -m tests.long.state_machine --programs 3000`; `python -m tests.long.planted_faults` shows
that planted faults are caught.
"""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings

import mlxrt
from mlxrt import Request, SamplingParams
from mlxrt.engine.sequence import Sequence

from ..support.state_machine.checker import Checker, draw_alone
from ..support.state_machine.kinds import KINDS, VOCAB, poison_kinds
from ..support.state_machine.planted import FAULTS
from ..support.state_machine.program import Program, programs
from ..support.state_machine.shrink import Court, try_program

KINDS_SEED = 100
EACH = 5  # programs of a kind; tests.long.state_machine runs thousands
HAPPEN = ("tokens compared", "requests with cached tokens", "evictions")  # with every kind


def test_planted_faults_fit_the_source():
    """One that does not is planted nowhere, and `planted_faults` would count it as missed."""
    package = Path(mlxrt.__file__).parent
    assert [fault.name for fault in FAULTS if (package / fault.file).read_text().count(fault.old) != 1] == []


@pytest.mark.parametrize("kind", KINDS)
def test_programs(kind):
    court = Court(Counter())

    @seed(KINDS_SEED + list(KINDS).index(kind))  # others for every kind, the same in every run
    @settings(max_examples=EACH, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(programs(kind, *poison_kinds((kind,), "float32"), longest=20))
    def each(program: Program) -> None:
        try_program(program, court)

    each()
    assert not [event for event in HAPPEN if not court.tally[event]], "the programs do too little"
    assert court.tally["programs"] >= EACH and court.tally["ties"] < 5


@pytest.mark.parametrize(("gap", "tied"), [(6e-8, True), (2e-6, True), (1e-3, False)])
def test_a_token_on_the_border_of_top_k_is_a_tie(gap, tied):
    """Where the k-th logit and the next are as good as equal, both may be kept: then another token may be drawn."""
    checker, row = Checker("full", Counter()), np.full(VOCAB, -9, np.float32)
    row[:5] = 1.5, 1.2, 0.97, 0.97 - gap, 0.1
    both = row.copy()
    both[3] = both[2]
    found = 0
    for n in range(24):
        params = SamplingParams(temperature=1.3, top_k=3, seed=n)
        seq = Sequence(0, Request(tokens=(1, 2), params=params), (1, 2), frozenset(), n)
        right, other = draw_alone(seq, (), row), draw_alone(seq, (), both)
        if right != other:
            found += 1
            assert checker._is_tie(seq, 0, other, right, row) == tied
    assert found > 3
