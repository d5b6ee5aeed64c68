"""What is proved in the simulator needs a C++ compiler; where there is none the tests say so."""

import pytest

from ..support.metal_sim import NoCompiler
from ..support.metal_sim.toolchain import compiler


@pytest.fixture(autouse=True)
def simulator_runs(request):
    if request.node.name.startswith(("test_kernel_is_the_op_on_this_device", "test_words")):
        return
    try:
        compiler()
    except NoCompiler as reason:
        pytest.skip(str(reason))
