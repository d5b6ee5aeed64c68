"""Killed in the middle of saving: a few rounds; `python -m tests.long.kill_during_save` runs 200 saves."""

from ...long.kill_during_save import torture


def test_killed_while_saving(tmp_path, monkeypatch):
    monkeypatch.setenv("MLXRT_CACHE", str(tmp_path / "cache"))
    kills, done, checked = torture(tmp_path, saves=4, seed=3)
    assert kills >= 1 and done >= 4 and checked >= 2
