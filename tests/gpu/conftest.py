"""Tests on a real GPU; all of them carry the marker `gpu` and are skipped where there is none."""

import os
from pathlib import Path

os.environ.setdefault("MLX_ENABLE_TF32", "0")  # before MLX computes: float32 references must not be rounded

import pytest

from bench.gpu.shapes import open_gpu
from mlxrt.kernels import backend

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if backend() == "cpu":
                item.add_marker(pytest.mark.skip(reason="there is no GPU here"))


@pytest.fixture(scope="session")
def gpu():
    return open_gpu()


def from_environment(name, default):
    """A comma-separated list that a run may override, such as GPU_SHAPES=qwen3-8b@4bit."""
    return os.environ.get(name, default).split(",")
