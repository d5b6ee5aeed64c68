"""Random programs on this device, with every cache kind: every token and logit against recomputation by plain MLX.

The state machine: requests, scores, sessions, forks, rewinds, saves, evictions. The scheduler: loads of requests that
arrive, wait, are cancelled and preempted. GPU_RANDOM_PROGRAMS=12,10 are how many of each a kind gets.
"""

import pytest

from tests.long.scheduler import work
from tests.support.state_machine.kinds import KINDS
from tests.support.state_machine.shrink import hunt

from .conftest import from_environment

MACHINE, LOADS = map(int, from_environment("GPU_RANDOM_PROGRAMS", "12,10"))
SEED = int(from_environment("GPU_SEED", "23")[0])


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_machine(kind, report):
    found = hunt((kind,), MACHINE, SEED * 1009)
    tally = found.tally
    report(
        f"state machine, {kind}: {tally[f'programs of {kind}']} programs, {tally['tokens compared']} tokens and "
        f"{tally['logit rows compared']} rows of logits compared, {tally['ties']} ties"
    )
    assert not found.failure, found.failure
    assert tally["tokens compared"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_scheduler(kind, report):
    tally, failure = work(kind, SEED * 1_000_003, LOADS)
    report(
        f"scheduler, {kind}: {tally['programs']} programs, {tally['requests']} requests, {tally['tokens compared']} "
        f"tokens compared, {tally['ties']} ties"
    )
    assert not failure, failure
    assert tally["tokens compared"]
