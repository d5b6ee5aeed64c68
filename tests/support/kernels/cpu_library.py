"""The compiled CPU kernels, for tests that need them."""

from pathlib import Path

import pytest

from mlxrt.kernels.cpu import build


def compiled_library(activations: str = "float32") -> Path:
    """Where they are; without a compiler the test is skipped."""
    try:
        return build.find_library(build.SOURCES / "__pycache__", activations)
    except build.BuildError as error:
        pytest.skip(f"no CPU kernels here: {error}")
