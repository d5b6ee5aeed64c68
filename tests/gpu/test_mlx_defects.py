"""Which of the defects of MLX that mlxrt goes round are still there: reported, never a failure."""

import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from mlxrt.kernels import backend
from mlxrt.kernels.mlx_defects import float32_is_exact

from .check_defect import CHECKS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", CHECKS)
def test_whether_mlx_has_mended_it(name, report):
    if backend() == "cpu":
        pytest.skip("seen on a GPU only")
    env = {key: value for key, value in os.environ.items() if key != "MLX_ENABLE_TF32"}
    command = [sys.executable, "-m", "tests.gpu.check_defect", name]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)
    said = done.stdout.strip().splitlines()[-1:]
    if done.returncode == 0 and said == ["mended"]:
        report(f"MLX {mx.__version__} on {backend()}: {name} does not show; is mlx_defects' way round still needed?")
    else:
        how = "wrong" if said == ["there"] else (done.stderr.strip().splitlines() or ["it crashed"])[-1][:120]
        report(f"MLX {mx.__version__} on {backend()}: {name} is still there ({how})")


def test_float32_is_exact_here():
    """What all other tests here rely on."""
    assert float32_is_exact()
