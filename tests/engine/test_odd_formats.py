"""Changed schemas, regexes and grammars: typed errors or right answers. `tests.long.mutate_formats` has more."""

from tests.long.mutate_formats import run


def test_changed_formats_are_refused_or_held():
    done, _ = run(60, seed=2, hard=False)
    assert done.wrong == 0
    assert any("BadRequest" in name for name in done.tally) and any("ended" in name for name in done.tally)
