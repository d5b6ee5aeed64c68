"""A process that tests one kernel before its first launch, as loading a model does. Run by tests/kernels/test_selftest.

    python -m tests.support.kernels.selftest_process FOLDER SECONDS

Prints `testing` when the test begins, waits so long inside it, and ends with what became of the kernel.
"""

import sys
import time
from pathlib import Path

from mlxrt.kernels import Kernels, make_gpu, selftest
from tests.support.kernels.toy_ops import TWICE, toy
from tests.support.metal_sim import Simulator

import mlx.core as mx  # isort: skip  after mlxrt, which loads a BLAS


def main() -> None:
    folder, seconds = Path(sys.argv[1]), float(sys.argv[2])
    run_cases = selftest.run_cases

    def run_slowly(*arguments):
        print("testing", flush=True)
        time.sleep(seconds)
        return run_cases(*arguments)

    selftest.run_cases = run_slowly
    kernels = Kernels("auto", make_gpu("metal", Simulator().metal_kernel))
    selftest.verify_on_first_use(kernels, folder)
    kernels.run(toy("right", 2, TWICE), x=mx.arange(32).astype(mx.float32))
    print(f"disabled {kernels.disabled}" if kernels.disabled else f"used {kernels.used}", flush=True)


if __name__ == "__main__":
    main()
