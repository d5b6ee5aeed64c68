"""Tests on a real GPU: all carry the marker `gpu` and are skipped where there is none. `make test-gpu` runs them.

PART=2/5 selects the second of five parts that take about as long; MLXRT_TEST_GPU=cpu tries what can run on a CPU.
"""

import os
from pathlib import Path

os.environ.setdefault("MLX_ENABLE_TF32", "0")  # before MLX computes: float32 references must not be rounded

import mlx.core as mx
import pytest

from bench.gpu.shapes import open_gpu
from mlxrt.kernels import backend

HERE = Path(__file__).parent
MAX_CACHE = 2 << 30  # bytes of spare buffers that a process keeps: several parts may share the device
ON_CPU = os.environ.get("MLXRT_TEST_GPU") == "cpu"
# Seconds that a test of a file takes on an H200, roughly; others a few.
SECONDS = {
    "test_ops": 8, "test_parity": 14, "test_random_programs": 20, "test_sampling": 6, "test_programs": 40,
    "test_shapes": 100, "test_experts": 10, "test_quantized_kv": 30, "test_mlx_defects": 10, "test_engine": 12,
    "test_k_quants": 40,
}  # fmt: skip


def pytest_collection_modifyitems(config, items):
    ours = [item for item in items if HERE in item.path.parents]
    for item in ours:
        item.add_marker(pytest.mark.gpu)
        if backend() == "cpu" and not ON_CPU:
            item.add_marker(pytest.mark.skip(reason="there is no GPU here"))
    part, parts = parse_part(os.environ.get("PART", "1/1"))
    others = {id(item) for item in ours} - {id(item) for item in divide(ours, parts)[part - 1]}
    if others:
        config.hook.pytest_deselected(items=[item for item in items if id(item) in others])
        items[:] = [item for item in items if id(item) not in others]


def parse_part(text):
    part, _, parts = text.partition("/")
    if not (part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts)):
        raise pytest.UsageError(f"PART must be like 2/5, not {text!r}")
    return int(part), int(parts)


def divide(items, parts):
    """The longest first, each to the part that has least so far."""
    shares, spent = [[] for _ in range(parts)], [0] * parts
    for item in sorted(items, key=lambda item: (-SECONDS.get(item.path.stem, 4), item.nodeid)):
        i = spent.index(min(spent))
        shares[i].append(item)
        spent[i] += SECONDS.get(item.path.stem, 4)
    return shares


def pytest_terminal_summary(terminalreporter):
    """What tests have to say besides passing: a property named `report`."""
    lines = [
        value
        for reports in terminalreporter.stats.values()
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == "report" and report.when == "call"
    ]
    if lines:
        terminalreporter.section("report")
        terminalreporter.write_line("\n".join(sorted(lines)))


@pytest.fixture(autouse=True)
def free_buffers():
    """Gives MLX's spare buffers back to the device after each test."""
    before = mx.set_cache_limit(MAX_CACHE)
    yield
    mx.set_cache_limit(before)
    mx.clear_cache()


@pytest.fixture
def report(record_property):
    """Says a line in the summary."""
    return lambda line: record_property("report", line)


@pytest.fixture(scope="session")
def gpu():
    found = open_gpu()
    if found is None:
        pytest.skip("needs a GPU's kernels")
    return found


def from_environment(name, default):
    """A comma-separated list that a run may override, such as GPU_SHAPES=qwen3-8b@4bit."""
    return os.environ.get(name, default).split(",")
