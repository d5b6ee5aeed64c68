"""The mutation of kernels is itself tried: what it makes, notices and lets pass. The whole run is a script."""

from dataclasses import replace

import pytest

from mlxrt.kernels import OPS

from ..long import mutate_kernels
from ..long.mutate_kernels import RECORD, Result, all_mutants, explanations, find_problems, main, read_record
from ..support.kernels.mutants import Mutant, Piece, functions, mutants, pieces, together
from ..support.kernels.try_mutant import REFUSED, SURVIVED, alarms, hunt

TEXT = """
    uint lane = thread_index_in_simdgroup; // lane < 3 is a comment
    threadgroup float t[4];
    if (lane < uint(K) && x[lane] >= 0.0f) t[0] = float((x[lane] >> (4 * i)) & 15u) + load8<T>(p);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[lane] = metal::min(simd_sum(t[0]), f(a, b)) + simd_shuffle_xor(v, 8);
"""
EXPECTED = {
    "barrier": [";", "threadgroup_barrier(mem_flags::mem_none);", "simdgroup_barrier(mem_flags::mem_threadgroup);"],
    "bound": ["lane <= uint(K)", "x[lane] > 0.0f", "lane < uint(K) || x", "(simd_sum(t[0])) + simd_shuffle"],
    "lane": [
        "uint lane = (thread_index_in_simdgroup + 1);",
        "if ((lane + 1) < uint(K)",
        "x[(lane + 1)] >=",
        "float((x[(lane + 1)]",
        "y[(lane + 1)]",
        "metal::min((t[0]), f(a, b))",
        "simd_shuffle_xor(v, (8) ^ 1)",
    ],
    "shift": [">> ((4 * i) + 1))", "<< (4 * i))", "& (15u >> 1)"],
}


def test_every_place_is_changed_once():
    made = mutants(Piece("toy", TEXT, ()))
    for kind, texts in EXPECTED.items():
        ours = [m for m in made if m.kind == kind]
        assert len(ours) == len(texts), [m.line for m in ours]
        for text in texts:
            assert sum(text in m.line for m in ours) >= 1, text
    assert all("a comment" not in m.line or "thread_index_in_simdgroup + 1" in m.line for m in made)


def test_functions_are_found_whole():
    declared = "template <int B> FN void g(int p);"
    text = f"FN float f(float a) {{ if (a > 0) {{ return 1; }} return 2; }}\n{declared}\nFN int h() {{ return 0; }}"
    assert [name for name, _ in functions(text)] == ["f", "h"]
    assert dict(functions(text))["f"].endswith("return 2; }")


def test_every_text_of_the_registry_is_a_piece():
    names = {p.name for p in pieces()}
    assert {source.name for op in OPS.values() for source in op.sources} <= names
    assert all(set(p.users) <= set(OPS) and p.users for p in pieces())


def test_a_mutant_is_noticed_and_the_original_is_not(tmp_path):
    body = next(p for p in pieces() if p.name == "mlxrt_add_norm")
    barrier = next(m for m in mutants(body) if m.line == ";")
    assert hunt(barrier, tmp_path) in ("race-wr", "uninit-read")
    assert hunt(changed(body, "float total = 0.0f;", "oops"), tmp_path) == REFUSED
    assert hunt(changed(body, "float total = 0.0f;", "float total = 0.0f + 0.0f;"), tmp_path) == SURVIVED


def changed(piece: Piece, old: str, new: str) -> Mutant:
    assert old in piece.text
    return Mutant("bound", new, ("", "", 0), (piece,), (piece.text.replace(old, new),))


def test_lines_that_bodies_share_are_changed_together():
    one, two = (Piece(n, f"first\n    if (a < b) x;\n    y = 1;\n{n} > 2;", (n,)) for n in ("one", "two"))
    made = together([*mutants(one), *mutants(two)])
    shared = [m for m in made if len(m.pieces) == 2]
    assert [m.line for m in shared] == ["if (a <= b) x;"]
    assert shared[0].users == ("one", "two") and len(made) == 3
    assert shared[0].planted(two.text) == two.text.replace("<", "<=")


def made(name: str, by: str) -> Result:
    return Result(Mutant("bound", name, ("", "", 0), (Piece("k", "", ()),), (name,)), by)


NINETEEN = [made(f"caught {i}", "numbers") for i in range(19)]
OUTCOMES = {
    "all noticed": (NINETEEN, {}, []),
    "explained": ([*NINETEEN, made("s", SURVIVED)], {"k: s": "no matter"}, []),
    "not explained": ([*NINETEEN, made("s", SURVIVED)], {}, ["not explained: k: s"]),
    "too many": ([*NINETEEN[1:], made("s", SURVIVED)], {"k: s": ""}, ["18 of 19 noticed, 95% wanted"]),
    "what does not compile does not count": ([*NINETEEN, made("c", REFUSED)], {}, []),
    "stale: caught": (NINETEEN, {"k: caught 0": ""}, ["explains one that is caught: k: caught 0"]),
    "stale: gone": (NINETEEN, {"k: gone": ""}, ["explains no mutant there is: k: gone"]),
}


@pytest.mark.parametrize("name", OUTCOMES)
def test_problems_of_an_outcome(name):
    results, known, wrong = OUTCOMES[name]
    assert find_problems(results, known, {r.mutant.label for r in results}, whole=True) == wrong


def test_explanations_name_mutants_that_exist():
    known, there = explanations(), {m.label for m in all_mutants()}
    assert not known.keys() - there
    assert all(len(reason) > 20 for reason in known.values())


def test_a_kernel_that_is_wrong_as_it_is_gives_the_alarm(monkeypatch, tmp_path):
    op = OPS["moe_combine"]
    assert alarms("moe_combine", tmp_path) == []
    wrong = replace(op, reference=lambda **arguments: 2 * op.reference(**arguments), name="doubled")
    monkeypatch.setitem(OPS, "doubled", wrong)
    assert alarms("doubled", tmp_path)


@pytest.fixture
def tried(monkeypatch):
    """Mutants that a run tries, all of them noticed; nothing is compiled."""
    found = []

    def each(function, things, jobs):
        if function is mutate_kernels.try_whole:
            return
        for mutant in things:
            found.append(mutant)
            yield mutant, "numbers"

    monkeypatch.setattr(mutate_kernels, "each", each)
    return found


def test_a_run_tries_what_is_not_recorded_for_the_kernels_text(tried, monkeypatch, tmp_path):
    record = tmp_path / "mutants.txt"
    record.write_text("0123456789abcdef numbers\n")  # of a mutant that is no more
    arguments = ["--op", "moe_combine", "--record", str(record)]
    assert main(arguments) == 0 and len(tried) == len(read_record(record)) > 3
    first = record.read_text()
    tried.clear()
    assert main(arguments) == 0 and not tried and record.read_text() == first
    assert main([*arguments, "--fresh"]) == 0 and len(tried) == len(read_record(record))
    tried.clear()
    monkeypatch.setattr(mutate_kernels, "kernel_digest", lambda op: "of another text")
    assert main(arguments) == 0 and tried


def test_the_record_has_an_outcome_of_a_mutant_once():
    lines = RECORD.read_text().splitlines()
    keys = [line.partition(" ")[0] for line in lines]
    assert lines == sorted(lines) and len(set(keys)) == len(keys)
    assert all(len(key) == 16 for key in keys)
