"""The cases of other engines' suites: we agree, or the difference is written down with its reason."""

import pytest

from .peer_cases import CASES, agrees, parse


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.suite}, {case.name}")
def test_peer_case(case):
    whole = parse(case)
    assert all(parse(case, seed) == whole for seed in (1, 2))
    if case.ours is None:
        assert agrees(case, whole)
    else:
        assert not agrees(case, whole) and whole == case.ours and case.why
