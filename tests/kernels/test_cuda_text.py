"""Every kernel's text is CUDA too, as far as NVIDIA's compiler can say without a GPU."""

import pytest

from mlxrt.kernels import OPS, make_gpu
from mlxrt.kernels.cuda.nvrtc import find_nvrtc
from mlxrt.kernels.dtypes import DTYPES
from mlxrt.kernels.selftest import list_cases

from ..support.kernels.cases import choose_cases
from ..support.kernels.nvrtc import Compiled, complaints
from .test_constant_buffer import constants, pack_constants

pytestmark = pytest.mark.skipif(
    find_nvrtc() is None, reason="NVIDIA's compiler is not here: pip install nvidia-cuda-nvrtc nvidia-cuda-runtime"
)


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.launch is not None])
def test_every_case_compiles(name):
    """`make test`: one case per dtype, another for each; `make test-kernels`: all."""
    compiled, op = Compiled(), OPS[name]
    gpu = make_gpu("cuda", compiled)
    for dtype in DTYPES:
        cases = [case for case in list_cases(op, dtype) if not op.unsupported(**case.arguments())]
        for case in choose_cases(cases, dtype):
            op.launch(gpu, **case.arguments())
    assert compiled.errors
    assert not [said for said in compiled.errors.values() if said]


def test_arrays_in_a_bundle_compile():
    compiled = Compiled()
    gpu = make_gpu("cuda", compiled)
    for op in OPS.values():
        cases = [c for c in list_cases(op, "bfloat16") if op.launch and not op.unsupported(**c.arguments())]
        if case := next((c for c in cases if len(constants(c)) > 1), None):
            op.launch(gpu, **pack_constants(case, gpu).arguments())
    assert len(compiled.errors) > 8
    assert not [said for said in compiled.errors.values() if said]


def test_a_text_that_cannot_run_is_noticed():
    held = "float v[64]; for (int i = 0; i < 64; i++) v[i] = x[i * 1024 + threadIdx.x]; "
    used = (
        "for (int r = 0; r < 64; r++) { float s = 0; for (int i = 0; i < 64; i++) s += v[i] * x[r * 7 + i]; y[r] = s; }"
    )
    text = f'extern "C" __global__ void f(float* y, const float* x) {{ {held} {used} }}'
    assert complaints(text, 256) == "" and "registers" in complaints(text, 2048)
    assert "error" in complaints("__global__ void f(float* y, const __half* x) { y[0] = 2.0f * x[0]; }")
