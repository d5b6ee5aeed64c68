"""Bugs planted in a sound kernel: each check is known to bite, and the sound one is left in peace."""

import mlx.core as mx
import pytest

from . import ASCENDING, DESCENDING, MetalCompileError, MetalSimError, Simulator, example

BARRIER = "    threadgroup_barrier(mem_flags::mem_threadgroup);\n"
STORE = "    if (sg == 0 && lane < ROWS && row0 + lane < uint(M)) {"
EVERY_SIMDGROUP = "    if (lane < ROWS && row0 + lane < uint(M)) {"
SUM = "float v = simd_sum(acc[r]);"
TREE = (
    "        float v = simd_sum(acc[r]);",
    "        float v = acc[r];\n" + "".join(f"        v += simd_shuffle_down(v, {n});\n" for n in (16, 8, 4, 2, 1)),
)
REREAD = ("            v += part[i][lane];", "            v += part[i][lane] + 0.0f * part[0][(lane + 1) % ROWS];")
ADD_UP = (
    "        for (int i = 0; i < NSG; i++) {\n            v += part[i][lane];\n        }",
    "        if (sg == 0) y[b * M + row0 + lane] = static_cast<T>(0);\n"
    "        v = part[sg][lane] + static_cast<float>(y[b * M + row0 + lane]);",
)
MIS = (
    "uint packed = w[row * (K / PACK) + k / PACK];",
    "uint packed = (*(const device uint4*)(w + row * (K / PACK) + k / PACK)).x;",
)
BIG = (
    "    threadgroup float part[NSG][ROWS];",
    "    threadgroup float part[NSG][ROWS];\n    threadgroup float big[8400];\n"
    "    big[thread_index_in_threadgroup] = 0.0f;",
)
INNER = "for (int i = 0; i < VPT; i++) {\n                xv"
# What is changed, and what must be found: a kind of finding, "numbers" (the result is wrong), or "compile".
BUGS: dict[str, tuple[list[tuple[str, str]], str]] = {
    "k <= K": ([("if (k < K)", "if (k <= K)")], "oob"),
    "no row guard on loads": ([("if (row < uint(M)) {", "{")], "oob"),
    "no row guard on the store": ([(" && row0 + lane < uint(M)", "")], "oob"),
    "x one row too far": ([("x + b * K", "x + (b + 1) * K")], "oob"),
    "scales at -1": ([("scales[row * (K / GS) + k / GS]", "scales[row * (K / GS) + k / GS - 1]")], "oob"),
    "local array overrun": ([(INNER, INNER.replace("<", "<="))], "array-bounds"),
    "threadgroup row short": ([("part[NSG][ROWS];", "part[NSG][ROWS - 1];")], "array-bounds"),
    "threadgroup simdgroup short": ([("part[NSG][ROWS];", "part[NSG - 1][ROWS];")], "array-bounds"),
    "wild pointer": ([("x + b * K", "x + (b - 1) * 1000000000")], "oob"),
    "write to an input": ([("float s = static", "((device float*)scales)[0] = 1.0f; float s = static")], "write-input"),
    "no barrier": ([(BARRIER, "")], "race-wr"),
    "barrier of nothing": ([("mem_flags::mem_threadgroup", "mem_flags::mem_none")], "race-wr"),
    "barrier of device memory": ([("mem_flags::mem_threadgroup", "mem_flags::mem_device")], "race-wr"),
    "simdgroup barrier instead": ([("threadgroup_barrier", "simdgroup_barrier")], "race-wr"),
    "barrier in a branch": ([(BARRIER, "    if (sg == 0) {\n" + BARRIER + "    }\n")], "divergent-barrier"),
    "return before the barrier": ([(BARRIER, "    if (sg == 1 && lane > 3) return;\n" + BARRIER)], "divergent-barrier"),
    "reuse without a second barrier": (
        [("        y[b * M", "        part[0][lane] = v;\n        y[b * M"), REREAD],
        "race-",
    ),
    "tree read from lane 1": ([TREE, ("if (lane == 0)", "if (lane == 1)")], "numbers"),
    "tree without its first step": ([TREE, ("v += simd_shuffle_down(v, 16);\n", "\n")], "numbers"),
    "shuffle from lane 32": ([(SUM, SUM + " v = simd_shuffle(v, 32);")], "inactive-lane"),
    "simd_sum in a branch": ([(SUM, "float v = 0; if (lane < 16) v = simd_sum(acc[r]);")], "partial-simd"),
    "shuffle from an absent lane": ([(SUM, SUM + " if (lane < 8) v = simd_shuffle(v, lane + 8);")], "inactive-lane"),
    "lane and simdgroup exchanged": ([("(sg * 32 + lane) * VPT", "(lane * 32 + sg) * VPT")], "numbers"),
    "last row of a tile not stored": ([("lane < ROWS &&", "lane < ROWS - 1 &&")], "unwritten-output"),
    "sum not zeroed": ([("        acc[r] = 0.0f;\n", "")], "numbers"),
    "only one simdgroup writes": (
        [("        if (lane == 0) {\n", "        if (lane == 0 && sg == 0) {\n")],
        "uninit-read",
    ),
    "two threadgroups write a row": (
        [("threadgroup_position_in_grid.y * ROWS", "(threadgroup_position_in_grid.y / 2) * ROWS")],
        "race-ww|benign-race|unwritten-output",
    ),
    "both simdgroups store one value": ([(STORE, EVERY_SIMDGROUP)], "benign-race"),
    "plain sum from two simdgroups": ([(STORE, EVERY_SIMDGROUP), ADD_UP], "race-"),
    "nibbles of three bits": ([("(4 * i)", "(3 * i)")], "numbers"),
    "bias left out": ([(" + z * xs", "")], "numbers"),
    "shift by 32": ([("(packed >> (4 * i)) & 0xf", "(packed >> (4 * i + 32 * (i == 7))) & 0xf")], "shift"),
    "division by zero": ([("k / GS", "k / (GS * int(lane))")], "div-zero"),
    "misaligned vector": ([MIS], "misaligned"),
    "too much threadgroup memory": ([BIG], "threadgroup-memory"),
    "endless loop": ([("v += part[i][lane];", "v += part[i][lane]; i -= (lane == 3) ? 1 : 0;")], "timeout"),
    "stack overflow": ([("float acc[ROWS];", "float acc[ROWS]; volatile float deep[70000]; deep[b] = 1.0f;")], "crash"),
    "double": ([("float d = 0.0f;", "double d = 0.0;")], "compile"),
    "std": ([("metal::fma", "std::fma")], "compile"),
}
SOUND = {"as it is": [], "with a tree of shuffles": [TREE]}


def edited(edits: list[tuple[str, str]]) -> str:
    source = example.SOURCE
    for old, new in edits:
        assert old in source
        source = source.replace(old, new, 1)
    return source


def outcome(source: str, order: int) -> set[str]:
    """Kinds of findings, with "numbers" when the result is off and "compile" when it does not get that far."""
    inputs, expected = example.operands(131, 768, 2, mx.float16)
    sim = Simulator(order, strict=False, seconds=1)
    try:
        y = example.matvec(sim.metal_kernel, inputs, source)
    except MetalCompileError:
        return {"compile"}
    wrong = not (mx.abs(y.astype(mx.float32) - expected).max().item() < 1e-2)
    return {f.kind for launch in sim.launches for f in launch.findings} | ({"numbers"} if wrong else set())


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name):
    edits, expected = BUGS[name]
    source = edited(edits)
    seen = outcome(source, ASCENDING) | outcome(source, DESCENDING)
    assert any(kind.startswith(e) for kind in seen for e in expected.split("|")), f"found only {sorted(seen)}"


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_kernel_is_left_in_peace(name):
    assert not outcome(edited(SOUND[name]), ASCENDING) | outcome(edited(SOUND[name]), DESCENDING)


def test_a_finding_names_kernel_thread_and_line():
    inputs, _ = example.operands(131, 768, 2, mx.float16)
    with pytest.raises(MetalSimError) as caught:
        example.matvec(Simulator().metal_kernel, inputs, edited(BUGS["no barrier"][0]))
    told = str(caught.value)
    line = example.SOURCE.replace(BARRIER, "").splitlines().index("            v += part[i][lane];")
    assert told.startswith("qmv4: [race-wr] threadgroup part[")
    # the signature stands before the source: template, name, 5 buffers, 3 attributes
    assert f"kernel.metal:{line + 1 + 9}" in told or "addr2line" not in told
    assert "lane 0" in told


def test_what_cuda_leaves_undefined_is_an_error_where_text_must_be_portable():
    inputs, _ = example.operands(131, 768, 2, mx.float16)
    for name in ("shift by 32", "simd_sum in a branch"):
        source = edited(BUGS[name][0])
        example.matvec(Simulator().metal_kernel, inputs, source)
        with pytest.raises(MetalSimError):
            example.matvec(Simulator(portable=True).metal_kernel, inputs, source)


def launch(source: str, threads: int, group: int, elements: int, sim: Simulator, **more) -> mx.array:
    kernel = sim.metal_kernel("k", ["x"], ["out"], source)
    grid = dict(grid=(threads, 1, 1), threadgroup=(group, 1, 1))
    return kernel(inputs=[mx.zeros(8)], output_shapes=[(elements,)], output_dtypes=[mx.float32], **grid, **more)[0]


WAIT = "barrier(mem_flags::mem_threadgroup); "
ORDER_OF_READERS = {
    # every lane of both simdgroups reads t[0]; simdgroup 0 writes it after a barrier of its own only
    "other simdgroup still reads": ("float a = t[0]; simdgroup_" + WAIT + "if (i == 0) t[0] = 2.0f;", "race-rw"),
    "the reader itself writes": ("float a = t[i]; t[i] = a + 1.0f;", ""),
    "a barrier between": ("float a = t[0]; threadgroup_" + WAIT + "if (i == 0) t[0] = 2.0f;", ""),
}


@pytest.mark.parametrize("name", ORDER_OF_READERS)
def test_readers_are_remembered(name):
    body, expected = ORDER_OF_READERS[name]
    start = "uint i = thread_position_in_threadgroup.x; threadgroup float t[64]; t[i] = x[0];"
    sim = Simulator(strict=False)
    launch(f"{start} {BARRIER.strip()} {body} out[i] = a;", 64, 64, 64, sim)
    assert {f.kind for f in sim.launches[0].findings} == ({expected} if expected else set())


UPDATE = "atomic_fetch_add_explicit(&t[0], 1u, memory_order_relaxed); "
BESIDE_UPDATES = {
    "updates only": (UPDATE, set()),
    "a load": (f"if (i != 63) {UPDATE} else a = atomic_load_explicit(&t[0], memory_order_relaxed);", {"race-wr"}),
    "a barrier of nothing before the load": (
        UPDATE + "threadgroup_barrier(mem_flags::mem_none); a = atomic_load_explicit(&t[0], memory_order_relaxed);",
        {"race-wr"},
    ),
    "a barrier before the load": (
        UPDATE + BARRIER.strip() + " a = atomic_load_explicit(&t[0], memory_order_relaxed);",
        set(),
    ),
}


@pytest.mark.parametrize("name", BESIDE_UPDATES)
def test_atomic_loads_beside_updates_are_races(name):
    body, expected = BESIDE_UPDATES[name]
    start = "uint i = thread_position_in_threadgroup.x; uint a = 0; threadgroup atomic_uint t[1];"
    start += " if (i == 0) atomic_store_explicit(&t[0], 0u, memory_order_relaxed); " + BARRIER.strip()
    sim = Simulator(strict=False)
    launch(f"{start} {body} out[i] = float(a);", 64, 64, 64, sim)
    assert {f.kind for f in sim.launches[0].findings} == expected


def test_reading_another_threadgroup_s_output_is_a_race():
    sim = Simulator(strict=False)
    launch("uint i = thread_position_in_grid.x; out[i] = 1.0f; if (i == 40) out[i] += out[0];", 64, 32, 64, sim)
    assert {f.kind for f in sim.launches[0].findings} == {"race-wr"}


def test_initial_values_count_as_written():
    sim = Simulator()
    out = launch("uint i = thread_position_in_grid.x; if (i == 3) out[i] = 1.0f;", 8, 8, 8, sim, init_value=7)
    assert out.tolist() == [7, 7, 7, 1, 7, 7, 7, 7]


def test_a_grid_of_broken_threadgroups_is_noted():
    sim = Simulator(strict=False, portable=True)
    launch("uint i = thread_position_in_grid.x; out[i] = 0.0f;", 40, 32, 40, sim)
    assert [f.kind for f in sim.errors()] == ["ragged-grid"]
