"""Every op of the kernel registry on this machine's GPU: each case and dtype against its reference in float32.

GPU_OPS=qmv,argmax checks these alone.
"""

import pytest

from mlxrt.kernels import OPS
from mlxrt.kernels.dtypes import DTYPES
from mlxrt.kernels.selftest import check_case, compute_reference, list_cases

from .conftest import from_environment

ON_GPUS = [name for name, op in OPS.items() if op.launch is not None]  # others have kernels for CPUs alone


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", from_environment("GPU_OPS", ",".join(ON_GPUS)))
def test_op_is_right_on_the_device(gpu, name, dtype):
    op, wrong, checked = OPS[name], [], 0
    for case in list_cases(op, dtype, large=True):
        if op.unsupported(**case.arguments()):
            continue
        checked += 1
        try:
            report = check_case(op, case, gpu, compute_reference(op, case))
        except (RuntimeError, ValueError) as error:
            wrong.append(f"{case.name}: {str(error)[:1500]}")
            continue
        if not report.within(op.tolerance[dtype]):
            wrong.append(f"{case.name}: {report.message}")
    assert not wrong, "\n".join(wrong)
    print(f"{name}, {dtype}: {checked} cases right")
