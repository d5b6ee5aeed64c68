"""The field's words: names of an older private vocabulary do not return, and kernel source stays in its own files.

A name is split into its words (`snake_case`, `CamelCase`); none of them may be an old one, unless it stands in ALLOWED.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from .support.source_tree import Module, Tree

pytestmark = pytest.mark.xdist_group("source")  # one worker parses the source
ROOT = Path(__file__).resolve().parents[1]
OLD = frozenset(
    """desk lane talk room underway ticket tickets watch hearing sealed shelf settle settled meet meets met lay
    laid told say tell codes coded places texts costless apart entry sums staged levels turned turning foreign verdict
    judge judged bustle novel contest side sides""".split()
)
# name -> (where, why). `where` is how the module's name begins, or several such beginnings.
ALLOWED = {
    "say": ("", "Session.say and AsyncSession.say: public"),
    "NoRoom": ("", "public error"),
    "side": ("mlxrt", "a keyword of numpy.searchsorted"),
    "codes": (
        ("mlxrt.models.quantized.codebook_linear", "tests.weights.jang.test_kernels"),
        "the checkpoint's name of a tensor",
    ),
    "EntryNotFoundError": ("mlxrt.weights.source.hub", "of huggingface_hub"),
    "LocalEntryNotFoundError": ("mlxrt.weights.source.hub", "of huggingface_hub"),
}
FOLDERS = ("mlxrt", "bench", "tests", "examples")
KERNEL_WORDS = ("simdgroup", "threadgroup")


@cache
def parse_all() -> Tree:
    return Tree(ROOT, *FOLDERS)


@cache
def words(name: str) -> set[str]:
    parts = (re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", part) for part in name.split("_"))
    return {word.lower() for part in parts for word in part}


def names(module: Module) -> Iterator[tuple[str, int]]:
    """Modules, classes, functions, attributes, parameters and constants, with their lines; tests are sentences."""
    yield from ((part, 0) for part in module.name.split("."))
    for node in module.nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            if not node.name.startswith("test_"):
                yield node.name, node.lineno
        elif isinstance(node, ast.Attribute):
            yield node.attr, node.lineno
        elif isinstance(node, (ast.arg, ast.keyword)) and node.arg:
            yield node.arg, node.lineno
        if isinstance(node, (ast.Module, ast.ClassDef)):
            for statement in node.body:
                targets = statement.targets if isinstance(statement, ast.Assign) else []
                targets = [statement.target] if isinstance(statement, ast.AnnAssign) else targets
                yield from ((t.id, t.lineno) for t in targets if isinstance(t, ast.Name))


def is_allowed(name: str, module: str) -> bool:
    return name in ALLOWED and module.startswith(ALLOWED[name][0])


def old_names(tree: Tree) -> list[str]:
    return [
        f"{module.name}:{line} {name}"
        for module in tree
        for name, line in dict.fromkeys(names(module))
        if words(name) & OLD and not is_allowed(name, module.name)
    ]


def kernel_source(tree: Tree) -> list[str]:
    """String literals, docstrings aside, that hold kernel source."""
    found = []
    for module in tree:
        described = {ast.get_docstring(n, clean=False) for n in module.nodes if isinstance(n, DESCRIBED)}
        for node in module.nodes:
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            if text not in described and any(word in text for word in KERNEL_WORDS):
                found.append(f"{module.name}:{node.lineno} {text.strip()[:60]!r}")
    return found


DESCRIBED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def test_no_old_name_returns():
    found = old_names(parse_all())
    assert not found, "\n".join(found)


def test_no_kernel_source_in_python():
    found = kernel_source(Tree(ROOT, "mlxrt"))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (old_names, "class EventDesk:\n    pass\n"),
        (old_names, "def settle():\n    pass\n"),
        (old_names, "def flush(coded):\n    pass\n"),
        (old_names, "def flush(x):\n    return x.told\n"),
        (old_names, "class A:\n    sums: int = 0\n"),
        (old_names, "VERDICT = 1\n"),
        (kernel_source, 'SOURCE = "threadgroup float part[32];"\n'),
        (kernel_source, 'SOURCE = f"{1} simdgroup_barrier();"\n'),
    ],
)
def test_planted_names_are_found(rule, text, tmp_path):
    (tmp_path / "mlxrt").mkdir()
    (tmp_path / "mlxrt" / "fine.py").write_text('"""A threadgroup."""\n\n\ndef flush(session):\n    session.say("x")\n')
    assert not rule(Tree(tmp_path, "mlxrt"))
    (tmp_path / "mlxrt" / "planted.py").write_text(text)
    assert len(rule(Tree(tmp_path, "mlxrt"))) == 1


def test_every_exception_is_needed():
    used = {name for module in parse_all() for name, _ in names(module) if is_allowed(name, module.name)}
    assert used == set(ALLOWED)
