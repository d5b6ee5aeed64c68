"""Every op of the kernel registry on this machine's GPU: each case and dtype against its reference in float32.

GPU_OPS=qmv,argmax checks these alone.
"""

import pytest

from mlxrt.kernels import OPS
from mlxrt.kernels.error_report import DTYPES, cases_of, prove, truth

from .conftest import from_environment


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", from_environment("GPU_OPS", ",".join(OPS)))
def test_op_is_right_on_the_device(gpu, name, dtype):
    op, wrong, checked = OPS[name], [], 0
    for case in cases_of(op, dtype, large=True):
        if op.unsupported(**case.arguments()):
            continue
        checked += 1
        try:
            proof = prove(op, case, gpu, truth(op, case))
        except (RuntimeError, ValueError) as error:
            wrong.append(f"{case.name}: {str(error)[:1500]}")
            continue
        if not proof.holds(op.tolerance[dtype]):
            wrong.append(f"{case.name}: {proof.told}")
    assert not wrong, "\n".join(wrong)
    print(f"{name}, {dtype}: {checked} cases right")
