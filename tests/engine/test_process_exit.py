"""Processes that used an engine end as they should: the exit code of the program, no abort, in every way to end."""

import subprocess
import sys

import pytest

from tests.support.exit_programs import ENDINGS, find_fault

QUICK = ("returns", "is_interrupted", "never_closes_while_running", "has_threads", "has_daemon_threads")


@pytest.mark.parametrize("way", [way if way in QUICK else pytest.param(way, marks=pytest.mark.slow) for way in ENDINGS])
def test_a_process_ends_with_its_own_exit_code(way):
    command = [sys.executable, "-m", "tests.support.exit_programs", way]
    done = subprocess.run(command, capture_output=True, timeout=120, check=False)
    assert find_fault(way, done.returncode, done.stderr) == ""
