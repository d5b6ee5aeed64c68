"""Small wrongs made by rule in Metal text: every barrier, bound, lane and shift, one at a time. Runs nothing.

A piece is the body of one kernel or one function that kernels call. Text that several of them share, a function or
lines of a body, is changed in all of them at once, as a hand would change it.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from mlxrt.kernels import OPS, KernelSource, Op
from mlxrt.kernels.metal_source import shim

Edit = tuple[int, int, str]  # from, to, instead


@dataclass(frozen=True)
class Piece:
    name: str
    text: str
    users: tuple[str, ...]  # ops whose kernels hold it


@dataclass(frozen=True)
class Mutant:
    kind: str  # barrier, bound, lane or shift
    line: str  # the line it changed, as it is now
    place: tuple[str, str, int]  # the lines before and after it, and which such place of its piece it is
    pieces: tuple[Piece, ...]
    mutated: tuple[str, ...]  # the text of each piece, mutated

    @property
    def label(self) -> str:
        return f"{self.pieces[0].name}: {self.line}"

    @property
    def key(self) -> str:
        """The label and where it is: no two mutants have the same."""
        return repr((self.label, self.kind, *self.place))

    @property
    def users(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for piece in self.pieces for name in piece.users))

    def planted(self, text: str) -> str:
        """A body or a header with the mutant where its pieces were."""
        for piece, text_of_mutant in zip(self.pieces, self.mutated):
            text = text.replace(piece.text, text_of_mutant)
        return text


def pieces(ops: dict[str, Op] | None = None) -> list[Piece]:
    """Every body and every function, each once."""
    users: dict[tuple[str, str], list[str]] = {}
    for name, op in (OPS if ops is None else ops).items():
        for source in op.sources:
            for found in [(source.name, source.body), *called(source)]:
                users.setdefault(found, []).append(name)
    return [Piece(name, text, tuple(dict.fromkeys(names))) for (name, text), names in users.items()]


def called(source: KernelSource) -> list[tuple[str, str]]:
    """The functions a body calls, itself or through others; a header holds more than one kernel needs."""
    there = list(functions(shim("metal") + source.helpers))
    reached, words = [], set(re.findall(r"\w+", source.body))
    while fresh := [f for f in there if f not in reached and f[0].split("<")[0] in words]:
        reached += fresh
        words = {word for _, text in fresh for word in re.findall(r"\w+", text)}
    return [f for f in there if f in reached]


def functions(text: str) -> Iterator[tuple[str, str]]:
    """(name, text from its first word to its closing brace) of each function defined at the top level."""
    for found in re.finditer(r"^(?:template <[^;{}]*?>\s)?FN \w+ (?P<name>\w+(?:<\w+>)?)\(", text, re.M):
        opened = text.find("{", found.end())
        if opened < 0 or ";" in text[found.end() : opened]:
            continue  # declared only
        yield found["name"], text[found.start() : closing(text, opened, "{}") + 1]


def swap(pattern: str, instead: str) -> Callable[[str], Iterator[Edit]]:
    def edits(text: str) -> Iterator[Edit]:
        for found in re.finditer(pattern, text):
            yield found.start(), found.end(), found.expand(instead)

    return edits


def closing(text: str, opened: int, pair: str = "()") -> int:
    """Where the parenthesis at `opened` is closed."""
    depth = 0
    for i in range(opened, len(text)):
        depth += (text[i] == pair[0]) - (text[i] == pair[1])
        if depth == 0:
            return i
    raise ValueError(f"unbalanced parentheses: {text[opened : opened + 60]}")


def parts(text: str, opened: int) -> list[str]:
    """The arguments of a call."""
    end, depth, found, start = closing(text, opened), 0, [], opened + 1
    for i in range(opened + 1, end):
        depth += (text[i] in "([") - (text[i] in ")]")
        if text[i] == "," and depth == 0:
            found.append(text[start:i])
            start = i + 1
    return [*found, text[start:end]]


def calls(name: str, instead: Callable[[list[str]], str]) -> Callable[[str], Iterator[Edit]]:
    def edits(text: str) -> Iterator[Edit]:
        for found in re.finditer(rf"\b{name}\(", text):
            opened = found.end() - 1
            yield found.start(), closing(text, opened) + 1, instead(parts(text, opened))

    return edits


def shifts(text: str) -> Iterator[Edit]:
    """One bit further."""
    for found in re.finditer(r"(>>|<<) ", text):
        start = found.end()
        if text[start] == "(":
            end = closing(text, start) + 1
        elif operand := re.compile(r"[\w.]+").match(text, start):
            end = operand.end()
        else:
            continue
        yield start, end, f"({text[start:end]} + 1)"


NAMED = r"(?<!uint )(?<!int )\b{}\b"  # where it is used, not where it is declared
RULES: list[tuple[str, Callable[[str], Iterator[Edit]]]] = [
    # mem_none orders nothing that can be seen: such a barrier is there to keep compilers from waiting with loads.
    ("barrier", swap(r"(?:threadgroup|simdgroup)_barrier\((?!mem_flags::mem_none)[^)]*\);", ";")),
    ("barrier", swap(r"mem_flags::mem_(?!none)\w+(?: \| mem_flags::mem_\w+)?", "mem_flags::mem_none")),
    ("barrier", swap(r"\bthreadgroup_barrier", "simdgroup_barrier")),
    ("bound", swap(r"(?<!template) < ", " <= ")),
    ("bound", swap(r" <= ", " < ")),
    ("bound", swap(r" > ", " >= ")),
    ("bound", swap(r" >= ", " > ")),
    ("bound", swap(r" == ", " != ")),
    ("bound", swap(r" != ", " == ")),
    ("bound", swap(r" && ", " || ")),
    ("bound", swap(r" \|\| ", " && ")),
    ("bound", calls("metal::min", lambda a: f"({a[0]})")),
    ("bound", calls("metal::max", lambda a: f"({a[0]})")),
    ("lane", swap(NAMED.format("lane"), "(lane + 1)")),
    ("lane", swap(NAMED.format("sg"), "(sg + 1)")),
    ("lane", swap(r"\bthread_index_in_simdgroup\b", "(thread_index_in_simdgroup + 1)")),
    ("lane", swap(r"\bsimdgroup_index_in_threadgroup\b", "(simdgroup_index_in_threadgroup + 1)")),
    ("lane", swap(r"\b(thread\w*_position_in_\w+\.[xyz])\b", r"(\1 + 1)")),
    ("lane", calls("simd_sum", lambda a: f"({a[0]})")),
    ("lane", calls("simd_max", lambda a: f"({a[0]})")),
    ("lane", calls("simd_min", lambda a: f"({a[0]})")),
    ("lane", calls("simd_shuffle_xor", lambda a: f"simd_shuffle_xor({a[0]}, ({a[1].strip()}) ^ 1)")),
    ("lane", calls("simd_shuffle", lambda a: f"simd_shuffle({a[0]}, ({a[1].strip()}) ^ 1)")),
    ("shift", shifts),
    ("shift", swap(r">> ", "<< ")),
    ("shift", swap(r"<< ", ">> ")),
    ("shift", swap(r" & (0x[0-9a-fA-F]+|\d+)u?\b", r" & (\1u >> 1)")),
]


def mutants(piece: Piece) -> list[Mutant]:
    # comments and directives hold nothing to change
    bare = re.sub(r"//[^\n]*|^[ ]*#[^\n]*", lambda m: " " * len(m.group()), piece.text, flags=re.M)
    found: dict[str, Mutant] = {}
    seen: Counter[tuple[str, str, str]] = Counter()
    for kind, edits in RULES:
        for start, end, instead in edits(bare):
            text = piece.text[:start] + instead + piece.text[end:]
            if text in found:
                continue
            before, line, after = lines_at(text, start)
            found[text] = Mutant(kind, line, (before, after, seen[before, line, after]), (piece,), (text,))
            seen[before, line, after] += 1
    return list(found.values())


def lines_at(text: str, place: int) -> tuple[str, str, str]:
    """The line at a place between its neighbours."""
    lines, number = ["", *text.split("\n"), ""], text.count("\n", 0, place)
    before, line, after = (" ".join(one.split()) for one in lines[number : number + 3])
    return before, line, after


def together(made: list[Mutant]) -> list[Mutant]:
    """The same change of the same lines in several pieces as one mutant."""
    found: dict[tuple[str, str, tuple[str, str, int]], Mutant] = {}
    for m in made:
        key = (m.kind, m.line, m.place)
        first = found.get(key)
        found[key] = replace(first, pieces=first.pieces + m.pieces, mutated=first.mutated + m.mutated) if first else m
    return list(found.values())
