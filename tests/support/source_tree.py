"""The package as source text: which module imports which, and what its syntax holds. Runs and judges nothing."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path


@cache
def parse(text: str) -> ast.Module:
    """The syntax of a text, parsed once for all trees that hold it."""
    return ast.parse(text)


@cache
def walk(text: str) -> tuple[ast.AST, ...]:
    """The nodes of a text, found once: the rules of the tests visit all of them a dozen times."""
    return tuple(ast.walk(parse(text)))


@dataclass(frozen=True)
class Import:
    """One imported module. `late`: inside a function; `typing`: for the type checker only."""

    target: str
    late: bool
    typing: bool
    line: int


@dataclass(frozen=True)
class Module:
    name: str  # dotted, like mlxrt.cache.memory
    path: Path
    package: str  # what `from .` means in it

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return parse(self.text)

    @property
    def nodes(self) -> tuple[ast.AST, ...]:
        return walk(self.text)

    @cached_property
    def imports(self) -> list[Import]:
        return list(self._imports(self.tree, False, False))

    def _imports(self, node: ast.AST, late: bool, typing: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, late, typing, child.lineno) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                yield from (Import(target, late, typing, child.lineno) for target in self._targets(child))
            inner = late or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            checked = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
            yield from self._imports(child, inner, typing or checked)

    def _targets(self, node: ast.ImportFrom) -> list[str]:
        above = self.package.split(".")
        base = ".".join(above[: len(above) - node.level + 1]) if node.level else ""
        whole = f"{base}.{node.module}".strip(".") if node.module else base
        # A name may be a module of its own (from . import blas) or live in one: whoever asks knows the modules.
        return [f"{whole}.{alias.name}" for alias in node.names]

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        for node in self.nodes:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield node

    def place(self, line: int) -> str:
        """The innermost function around a line, as module.function."""
        around = [f for f in self.functions() if f.lineno <= line <= (f.end_lineno or f.lineno)]
        inner = max(around, key=lambda f: f.lineno).name if around else "<module>"
        return f"{self.name}.{inner}"


class Tree:
    """Every module below some folders of one root."""

    def __init__(self, root: Path, *folders: str):
        paths = [path for folder in folders for path in sorted((root / folder).rglob("*.py"))]
        self.modules = {module.name: module for module in (self._module(root, path) for path in paths)}

    @staticmethod
    def _module(root: Path, path: Path) -> Module:
        parts = path.relative_to(root).with_suffix("").parts
        if parts[-1] == "__init__":
            return Module(".".join(parts[:-1]), path, ".".join(parts[:-1]))
        return Module(".".join(parts), path, ".".join(parts[:-1]))

    def __iter__(self) -> Iterator[Module]:
        return iter(self.modules.values())

    def resolve(self, target: str) -> str:
        """The module a target is, or lives in; the target itself where it is nobody of ours."""
        name = target
        while name:
            if name in self.modules:
                return name
            name = name.rpartition(".")[0]
        return target

    def reached(self, start: str, without: tuple[str, ...] = ()) -> dict[str, tuple[str, ...]]:
        """Everything that importing and running `start` may import, each with the way to it; type hints aside."""
        ways: dict[str, tuple[str, ...]] = {start: (start,)}
        todo = [start]
        while todo:
            name = todo.pop()
            if name not in self.modules:
                continue
            parents = [name.rsplit(".", n)[0] for n in range(1, name.count(".") + 1)]
            targets = [self.resolve(i.target) for i in self.modules[name].imports if not i.typing]
            for target in [*parents, *targets]:
                if target not in ways and target not in without:
                    ways[target] = (*ways[name], target)
                    todo.append(target)
        return ways
