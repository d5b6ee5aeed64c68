"""mlxrt before MLX: it brings the BLAS that MLX then finds."""

import random
import signal

import pytest

import mlxrt  # noqa: F401

from .support.log_lines import reset_log


@pytest.fixture
def hears_ctrl_c():
    """A script's background jobs ignore Ctrl-C, and so do their children: the tests may run in one."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def seeded_random():
    """A test draws the same numbers whatever ran before it in its process."""
    import mlx.core as mx
    import numpy as np

    mx.random.seed(0)
    np.random.seed(0)
    random.seed(0)


@pytest.fixture(autouse=True)
def released_log():
    """No test hears what the next one logs."""
    yield
    reset_log()
