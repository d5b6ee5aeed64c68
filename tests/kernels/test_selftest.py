"""A machine that computes a kernel wrongly (here: the simulator): it is named, disabled and not asked again."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
import pytest

from mlxrt.kernels import OPS, Kernels, make_gpu, selftest
from mlxrt.kernels.dispatch import compute_dtype
from mlxrt.kernels.dtypes import DTYPES
from mlxrt.kernels.selftest import (
    QUICK_CASES,
    ResultFile,
    compare_outputs,
    list_cases,
    list_launched_cases,
    ops_with_kernels,
    run_cases,
    verify,
    verify_on_first_use,
)

from ..support.kernels.inline_source import InlineSource
from ..support.kernels.toy_ops import THRICE, TWICE, toy
from ..support.log_lines import capture_log
from ..support.metal_sim import Simulator

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def two_ops(monkeypatch):
    """A right one and a wrong one instead of the registry's."""
    monkeypatch.setattr(
        "mlxrt.kernels.selftest.OPS", {"right": toy("right", 2, TWICE), "wrong": toy("wrong", 2, THRICE)}
    )


def machine() -> tuple[Kernels, Simulator, list[str]]:
    sim, said = Simulator(), capture_log()
    return Kernels("auto", make_gpu("metal", sim.metal_kernel)), sim, said


def test_the_wrong_one_is_disabled_named_and_not_used(two_ops, tmp_path):
    kernels, _, said = machine()
    found = verify(kernels, ["float32"], tmp_path)
    assert {v.op: v.passed for v in found} == {"right": True, "wrong": False}
    assert list(kernels.disabled) == ["wrong"]
    told = [line for line in said if line.startswith("wrong: kernel disabled")]
    assert len(told) == 1 and "one row" in told[0] and "off by 0.5" in told[0]
    x = mx.arange(32).astype(mx.float32)
    for op in (toy("right", 2, TWICE), toy("wrong", 2, THRICE)):
        assert mx.array_equal(kernels.run(op, x=x), 2 * x)
    assert kernels.used == {"right": 1}
    assert [op for op, _ in kernels.fallbacks] == ["wrong"]


def test_the_second_load_remembers(two_ops, tmp_path):
    first, _, _ = machine()
    verify(first, ["float32"], tmp_path)
    second, sim, said = machine()
    verify(second, ["float32"], tmp_path)
    assert not sim.launches
    assert list(second.disabled) == ["wrong"]
    assert [line for line in said if "disabled" in line]  # said at every load
    verify(second, ["float32", "float16"], tmp_path)
    assert sim.launches  # another dtype is another question


def test_another_text_or_machine_is_asked_again(two_ops, tmp_path, monkeypatch):
    kernels, _, _ = machine()
    verify(kernels, ["float32"], tmp_path)
    for change in (
        ("shim", lambda name: "// another header"),
        ("platform", type("P", (), {"system": str, "release": str})),
    ):
        with monkeypatch.context() as m:
            m.setattr(selftest, *change)
            fresh, sim, said = machine()
            verify(fresh, ["float32"], tmp_path)
            assert sim.launches and said[0].startswith("checking 2 kernels")


def test_a_text_that_does_not_compile_is_a_wrong_one(monkeypatch, tmp_path):
    broken = toy(
        "broken", 2, InlineSource("broken", ("x",), ("y",), text="thread_position_in_threadgroup; no such thing")
    )
    monkeypatch.setattr("mlxrt.kernels.selftest.OPS", {"broken": broken})
    kernels, _, _ = machine()
    verify(kernels, ["bfloat16"], tmp_path)
    assert "broken" in kernels.disabled


def test_a_crash_while_trying_disables_the_kernel_next_time(two_ops, tmp_path, monkeypatch):
    """The process dies inside the try: what it left in the file is what the next load reads."""
    kernels, _, _ = machine()
    left = {}

    def dies(op, gpu, dtype, most):
        left[op.name] = ResultFile(tmp_path, gpu).path.read_bytes()
        raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setattr(selftest, "run_cases", dies)
        with pytest.raises(KeyboardInterrupt):
            verify(kernels, ["float32"], tmp_path)
    record = ResultFile(tmp_path, kernels.gpu)
    assert not record.results  # an interruption is no verdict
    record.path.write_bytes(left["right"])
    after, _, _ = machine()
    verify(after, ["float32"], tmp_path)
    assert "process ended" in after.disabled["right"]


def start_process(folder: Path, seconds: float) -> subprocess.Popen:
    command = [sys.executable, "-m", "tests.support.kernels.selftest_process", str(folder), str(seconds)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_two_processes_that_start_together_both_use_the_kernel(tmp_path):
    """The second comes while the first is inside the test: that is no crash. Then one is killed there: that is one."""
    with start_process(tmp_path, 3.0) as first:
        assert first.stdout.readline() == "testing\n"
        with start_process(tmp_path, 0.0) as second:
            assert second.stdout.read() == "used {'right': 1}\n"  # it waited and took the result
        assert first.stdout.read() == "used {'right': 1}\n"
    assert not list(tmp_path.glob(".*partial*"))


def test_a_process_that_is_killed_inside_a_test_disables_the_kernel(tmp_path):
    with start_process(tmp_path, 60.0) as first:
        assert first.stdout.readline() == "testing\n"
        first.kill()
    with start_process(tmp_path, 0.0) as second:
        assert "process ended" in second.stdout.read()


def test_a_test_that_never_ends_keeps_nobody_waiting(two_ops, tmp_path, monkeypatch):
    monkeypatch.setattr(selftest, "LOCK_WAIT", 0.05)
    kernels, sim, _ = machine()
    file = ResultFile(tmp_path, kernels.gpu)
    with file.locked() as mine:
        assert mine
        file.put(toy("right", 2, TWICE), selftest.SelfTestResult("right", "float32", False, 1.0, 0, selftest.CRASHED))
        assert {v.op: v.passed for v in verify(kernels, ["float32"], tmp_path)} == {"right": True, "wrong": False}
    assert sim.launches and list(kernels.disabled) == ["wrong"]


def test_results_of_another_process_are_not_lost(two_ops, tmp_path):
    """Both began with an empty file."""
    kernels, _, _ = machine()
    early = ResultFile(tmp_path, kernels.gpu)
    verify(kernels, ["float32"], tmp_path)
    with early.locked():
        early.put(toy("right", 2, TWICE), selftest.SelfTestResult("right", "float16", True, 0.1, 1))
    assert len(ResultFile(tmp_path, kernels.gpu).results) == 3


def test_what_killed_writers_left_is_removed(two_ops, tmp_path):
    for name in (".mlxrt-partial-old", ".mlxrt-partial-young"):
        (tmp_path / name).write_text("half")
        if name.endswith("old"):
            os.utime(tmp_path / name, (time.time() - 3600,) * 2)
    verify(machine()[0], ["float32"], tmp_path)
    assert [path.name for path in tmp_path.glob(".*partial*")] == [".mlxrt-partial-young"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"machine": 1, "results": []}', '{"results": {"a": {"b": 1}}}'])
def test_a_spoiled_record_is_asked_for_again(two_ops, tmp_path, text):
    kernels, sim, _ = machine()
    ResultFile(tmp_path, kernels.gpu).path.write_text(text)
    verify(kernels, ["float32"], tmp_path)
    assert sim.launches and list(kernels.disabled) == ["wrong"]
    assert len(json.loads(ResultFile(tmp_path, kernels.gpu).path.read_text())["results"]) == 2


def test_no_place_to_remember_is_said(two_ops, tmp_path):
    (tmp_path / "file").write_text("")
    kernels, _, said = machine()
    verify(kernels, ["float32"], tmp_path / "file")
    assert list(kernels.disabled) == ["wrong"]
    assert any(line.startswith("cannot write kernel test results") for line in said)


def test_nothing_is_tried_without_a_gpu(tmp_path):
    assert verify(Kernels("auto", None), ["float32"], tmp_path) == []


def test_trying_leaves_the_random_state_alone():
    mx.random.seed(7)
    expected = mx.random.normal((3,))
    mx.random.seed(7)
    for op in OPS.values():
        list_cases(op, "float16")
    assert mx.array_equal(mx.random.normal((3,)), expected)


def test_an_op_of_the_registry_is_tested_by_its_own_cases():
    op = next(iter(OPS.values()))
    gpu = make_gpu("metal", Simulator(portable=True).metal_kernel)
    assert run_cases(op, gpu, "float16", most=2).passed

    def spoiled(source, **rest):
        return Simulator(strict=False).metal_kernel(source=source.replace("simd_sum", "simd_max"), **rest)

    found = run_cases(op, make_gpu("metal", spoiled), "float16", most=2)
    assert not found.passed and found.cases == 1 and found.message


def test_nan_and_wrong_types_are_infinitely_wrong():
    right = (mx.array([1.0, 2.0]), mx.array([3.0]))
    assert compare_outputs(right, right, right).error == 0
    for spoiled in (
        (mx.array([1.0, float("nan")]), mx.array([3.0])),  # also when a later output is right
        (mx.array([1.0, 2.0]).astype(mx.float16), mx.array([3.0])),
        (mx.array([[1.0, 2.0]]), mx.array([3.0])),
        (mx.array([1.0, 2.0]),),
        (mx.array([1, 2]), mx.array([3.0])),
    ):
        assert compare_outputs(spoiled, right, right).error == float("inf")
    far = (mx.array([1.0, float("-inf")]), mx.array([3.0]))
    assert compare_outputs(far, far, far).error == 0
    assert compare_outputs(right, far, far).error == float("inf")
    whole = (mx.array([1, 2]),)
    assert compare_outputs(whole, whole, whole).error == 0
    assert compare_outputs((mx.array([1, 3]),), whole, whole).error == float("inf")


def test_what_would_never_be_launched_is_not_tried():
    op = toy("slow", 2, THRICE)
    op.is_faster = lambda x: False
    found = run_cases(op, make_gpu("metal", Simulator().metal_kernel), "float32")
    assert found.passed and found.cases == 0


def test_a_kernel_is_asked_about_when_it_is_first_used(two_ops, tmp_path):
    right, wrong = toy("right", 2, TWICE), toy("wrong", 2, THRICE)
    kernels, sim, said = machine()
    verify_on_first_use(kernels, tmp_path)
    assert not sim.launches and not said
    x = mx.arange(32).astype(mx.float32)
    for _ in range(2):
        for op in (wrong, right):
            assert mx.array_equal(kernels.run(op, x=x), 2 * x)
    assert [line for line in said if line.startswith("checking")] == [
        f"checking the kernel of {name} on {ResultFile(tmp_path, kernels.gpu).machine['device'] or 'metal'}, once for "
        "this machine and MLX"
        for name in ("wrong", "right")
    ]
    assert kernels.used == {"right": 2} and list(kernels.disabled) == ["wrong"]
    kernels.run(right, x=x.astype(mx.bfloat16))
    assert len([line for line in said if line.startswith("checking")]) == 3  # another dtype is another question


def test_inside_a_compiled_function(two_ops, tmp_path, monkeypatch):
    """Tracing goes on while the kernel is tried on numbers of its own."""
    asked, right = [], toy("right", 2, TWICE)
    kernels, _, _ = machine()

    def self_test(op, dtype):
        asked.append(run_cases(op, kernels.gpu, dtype))

    kernels.self_test = self_test

    def traced(x):
        kernels._test_once(right, "float32")
        return x * 2

    assert mx.array_equal(mx.compile(traced)(mx.ones(4)), 2 * mx.ones(4))
    assert asked[0].passed and asked[0].cases == 2


@pytest.mark.parametrize(
    ("arguments", "dtype"),
    [
        ([mx.zeros(2), mx.bfloat16], "bfloat16"),
        ([mx.zeros(2, mx.uint32), mx.zeros(2, mx.float16), mx.float32], "float16"),
        ([mx.zeros(2), None, 3, "silu"], "float32"),
        ([mx.zeros(2, mx.uint32)], "float32"),
    ],
)
def test_what_a_call_computes_in(arguments, dtype):
    assert compute_dtype(arguments) == dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kernel_has_small_cases_that_would_be_launched(dtype):
    """A verdict on no case at all would be a good one. Only products of halves take no float32."""
    counts = {name: len(list_launched_cases(op, dtype, large=False)) for name, op in ops_with_kernels().items()}
    few = {name for name, n in counts.items() if n < QUICK_CASES}
    assert few == ({"qmm", "moe_grouped"} if dtype == "float32" else set())
