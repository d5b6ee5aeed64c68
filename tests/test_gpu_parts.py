"""How `make test-gpu` is divided (tests/gpu/conftest.py): every test in one part, and the parts about as long."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.gpu.conftest import divide, parse_part


@dataclass(frozen=True)
class Item:
    path: Path
    nodeid: str


FILES = ("test_ops", "test_parity", "test_new")
ITEMS = [Item(Path(f"{file}.py"), f"{file}[{i}]") for file in FILES for i in range(30)]


@pytest.mark.parametrize("parts", [1, 4, 7, 200])
def test_every_test_is_in_one_part(parts):
    shares = divide(ITEMS, parts)
    assert len(shares) == parts
    assert sorted((item for share in shares for item in share), key=str) == sorted(ITEMS, key=str)
    assert divide(ITEMS[::-1], parts) == shares  # whatever order they are found in


def test_parts_are_about_as_long():
    counts = [[item.path.stem for item in share].count("test_parity") for share in divide(ITEMS, 5)]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("text", ["0/3", "4/3", "2", "a/b", "-1/3", ""])
def test_a_part_that_does_not_exist_is_refused(text):
    with pytest.raises(pytest.UsageError, match="PART must be like 2/5"):
        parse_part(text)
    assert parse_part("2/5") == (2, 5)
