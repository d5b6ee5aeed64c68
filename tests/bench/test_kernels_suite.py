"""The kernels suite: refused without a GPU, and with the simulator in a GPU's place every case is found and right."""

import pytest

import mlxrt
from mlxrt import kernels
from mlxrt.bench.backends.kernels import KernelBackend
from mlxrt.bench.comparison import Comparison, Options
from mlxrt.bench.result import OURS
from mlxrt.bench.statistics import StoppingRule
from mlxrt.bench.suites import cases
from mlxrt.bench.suites.kernels import REFERENCE
from tests.support.metal_sim import NoCompiler, Simulator
from tests.support.metal_sim.toolchain import compiler


def test_without_a_gpu_it_says_so():
    if kernels.backend() != "cpu":
        pytest.skip("this machine has a GPU")
    with pytest.raises(mlxrt.MlxrtError, match="no GPU here"):
        KernelBackend({})


@pytest.fixture
def simulated(monkeypatch):
    try:
        compiler()
    except NoCompiler as reason:
        pytest.skip(str(reason))
    whole, make = kernels.OPS["add_norm"], Simulator().metal_kernel
    small = type(whole)(**vars(whole) | {"cases": lambda dtype: (c for c in whole.cases(dtype) if not c.large)})
    monkeypatch.setattr(kernels, "OPS", {"add_norm": small})
    monkeypatch.setattr(kernels, "backend", lambda: "metal")
    gpu = kernels.make_gpu("metal", make)
    monkeypatch.setattr(kernels, "make_gpu", lambda name, folder: gpu)
    monkeypatch.setattr("mlxrt.bench.backends.kernels.LAUNCHES", 1)
    return KernelBackend({})


class InProcess:
    def __init__(self, bench):
        self.bench = bench

    def ask(self, **question):
        return self.bench.reply(question)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


def test_every_case_is_timed_and_checked(simulated, monkeypatch):
    simulated.todo = simulated.todo[:2]
    listed = simulated.list()
    assert {row["op"] for row in listed} == {"add_norm"} and all(row["bytes"] > 0 for row in listed)
    monkeypatch.setattr("mlxrt.bench.suites.kernels.Backend", lambda name, setting: InProcess(simulated))
    options = Options((8,), 2, StoppingRule(min_rounds=2, max_rounds=2))
    comparison = Comparison(None, {}, options, {"copy_bytes_per_s": 1e9}, lambda count, section: [])
    [case] = cases("kernels", options)
    figures = list(case.run(comparison))
    assert len(figures) == 2 and not comparison.problems
    assert all(set(f.engines) == {OURS, REFERENCE} and f.roofline and "MB moved" in f.notes[0] for f in figures)


def test_a_wrong_kernel_is_a_problem(simulated, monkeypatch):
    simulated.todo = simulated.todo[:1]
    op = simulated.todo[0][0]
    right = op.launch
    op.launch = lambda gpu, **given: [2 * a for a in right(gpu, **given)]
    monkeypatch.setattr("mlxrt.bench.suites.kernels.Backend", lambda name, setting: InProcess(simulated))
    options = Options((8,), 2, StoppingRule(min_rounds=2, max_rounds=2))
    comparison = Comparison(None, {}, options, {"copy_bytes_per_s": 1e9}, lambda count, section: [])
    [case] = cases("kernels", options)
    list(case.run(comparison))
    assert len(comparison.problems) == 1 and "WRONG" in comparison.problems[0]
