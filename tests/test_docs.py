"""What README and docs/ say is there: names, files and links exist, and nothing speaks of how it was made."""

import re
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest

import mlxrt

from .support.api_page import CLASSES, PAGE

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
LONGEST_README, LONGEST_DECISION, MOST_TERMS = 150, 60, 25

# The history of the work belongs into commits. ../shared is a folder beside the repository, for makers of fixtures.
HISTORY = re.compile(r"\bsession \d+|\bsessions \d|\blent\b|\bissue \d+", re.IGNORECASE)
BESIDE = "../shared"
MAKERS = re.compile(r"tests/parity/make_|tests/weights/jang/make_|tests/(gguf_)?parity_adapter")


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= LONGEST_README


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http:", "https:")):
            assert (page.parent / target).exists(), f"{page.name} links {target}"


def test_api_page_has_every_public_name():
    """`python -m tests.support.api_page` writes the page anew."""
    text = PAGE.read_text(encoding="utf-8")
    names = {
        *mlxrt.__all__,
        *(f.name for f in fields(mlxrt.EngineConfig)),
        *(f.name for f in fields(mlxrt.SamplingParams)),
    }
    for cls, members in CLASSES.items():
        names |= {name for name in members.split() if hasattr(getattr(mlxrt, cls), name)}
        assert all(hasattr(getattr(mlxrt, cls), name) for name in members.split())
    missing = {name for name in names if not re.search(rf"\b{name}\b", text)}
    assert not missing
    assert not re.findall(r"(?m)^\| `.*\|  \|$", text), "rows without a description"


def test_glossary_is_short():
    rows = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").splitlines()
    assert len([row for row in rows if row.startswith("| ")]) - 1 <= MOST_TERMS


def test_decisions_are_numbered_and_have_one_form():
    pages = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    assert [page.name[:4] for page in pages] == [f"{n:04}" for n in range(1, len(pages) + 1)]
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert text.startswith(f"# {page.name[:4]} "), page.name
        headings = re.findall(r"^#{2,} .*$", text, re.MULTILINE)
        assert headings == ["## Context", "## Decision", "## Consequences"], page.name
        assert len(text.splitlines()) <= LONGEST_DECISION, page.name


def test_nothing_speaks_of_how_it_was_made():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    found = []
    for name in listed.stdout.split("\n"):
        path = ROOT / name
        if (
            path.suffix not in (".py", ".md", ".metal", ".h", ".cpp", ".sh", ".toml", ".yml")
            and path.name != "Makefile"
        ):
            continue
        if name == "tests/test_docs.py" or not path.is_file():
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if HISTORY.search(line) or (BESIDE in line and not MAKERS.match(name)):
                found.append(f"{name}:{number}: {line.strip()[:100]}")
    assert not found, "\n".join(found)
