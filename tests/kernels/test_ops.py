"""Every op of the registry: its Metal text in the simulator against its meaning in float32, with nothing found.

`make test` takes one case per op and dtype, `make test-kernels` (MLXRT_KERNEL_CASES=all) every case in every dtype.
"""

import mlx.core as mx
import pytest

from mlxrt.kernels import OPS, backend, make_gpu
from mlxrt.kernels.dtypes import DTYPES
from mlxrt.kernels.selftest import check_case, compute_reference, flatten_outputs, list_cases, ops_with_kernels

from ..support.kernels.cases import EVERYTHING, all_cases
from ..support.kernels.function_ops import FUNCTION_OPS
from ..support.metal_sim import ASCENDING, DESCENDING, Simulator, spaces
from ..support.metal_sim.lint import lint
from ..support.metal_sim.text import Definition


def chosen():
    """(op, dtype, number of the case): where only some are taken, another case for each dtype."""
    for name, op in ops_with_kernels().items():
        for turn, dtype in enumerate(DTYPES):
            names = [case.name for case in all_cases(op, dtype)]
            taken = range(len(names)) if EVERYTHING else [turn % len(names)] if names else []
            for number in taken:
                yield pytest.param(name, dtype, number, id=f"{name}-{dtype}-{names[number]}")


@pytest.mark.parametrize(("name", "dtype", "number"), list(chosen()))
def test_kernel_is_the_op(name, dtype, number):
    op = OPS[name]
    case = all_cases(op, dtype)[number]
    expected, texts = compute_reference(op, case), set()
    for order in (ASCENDING, DESCENDING):
        sim = Simulator(order, portable=True)
        report = check_case(op, case, make_gpu("metal", sim.metal_kernel), expected)
        assert sim.launches
        assert report.within(op.tolerance[dtype]), report.message
        texts |= {launch.text for launch in sim.launches}
    if spaces.available():
        assert not [line for text in texts for line in spaces.complaints(text)]


@pytest.mark.parametrize("name", FUNCTION_OPS)
def test_functions_are_exact(name):
    op = FUNCTION_OPS[name]
    for case in op.cases(mx.float32):
        report = check_case(op, case, make_gpu("metal", Simulator().metal_kernel), compute_reference(op, case))
        assert report.within(0.0), report.message


@pytest.mark.parametrize("name", ops_with_kernels())
def test_no_case_is_refused_in_every_dtype(name):
    """A case its own kernel never takes proves nothing."""
    op = OPS[name]
    taken = {case.name for dtype in DTYPES for case in all_cases(op, dtype)}
    assert not {case.name for case in list_cases(op, "float32")} - taken


@pytest.mark.skipif(backend() == "cpu", reason="no GPU here: kernels run in the simulator")
@pytest.mark.parametrize(("name", "dtype"), [(name, dtype) for name in ops_with_kernels() for dtype in DTYPES])
def test_kernel_is_the_op_on_this_device(name, dtype):
    op = OPS[name]
    for case in list_cases(op, dtype, large=True):
        if op.unsupported(**case.arguments()):
            continue
        report = check_case(op, case, make_gpu(backend()), compute_reference(op, case))
        assert report.within(op.tolerance[dtype]), f"{case.name}: {report.message}"


@pytest.mark.parametrize("name", ops_with_kernels())
def test_words_are_metal_s_and_cuda_s(name):
    found = [line for source in OPS[name].sources for line in lint(source.helpers, source.body)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", ops_with_kernels())
def test_text_is_the_one_mlx_would_compile(name, tmp_path, capfd):
    """MLX writes its text without Metal while a function is exported."""
    op = OPS[name]
    case, texts = list_cases(op, "bfloat16")[0], []

    def only_text(name, input_names, output_names, source, header):
        definition = Definition(name, tuple(input_names), tuple(output_names), source, header)

        def launch(*, inputs, output_shapes, output_dtypes, template, **_):
            texts.append(definition.text(inputs, output_dtypes, template).text)
            return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes)]

        return launch

    op.launch(make_gpu("metal", only_text), **case.arguments())

    def telling(**definition):
        kernel = mx.fast.metal_kernel(**definition)
        return lambda **call: kernel(verbose=True, **call)

    capfd.readouterr()
    gpu = make_gpu("metal", telling)
    outputs = flatten_outputs
    mx.export_function(str(tmp_path / "op.mlxfn"), lambda: [x for _, x in outputs(op.launch(gpu, **case.arguments()))])
    told = capfd.readouterr().out.split("```\n")[1::2]
    assert texts and [text.removesuffix("\n") for text in told] == texts


@pytest.mark.parametrize("name", ["qmv", "add_norm_qmv", "moe_router", "moe_gate_up"])
def test_a_norm_of_another_type_is_refused(name):
    op = OPS[name]
    case = next(case for case in all_cases(op, "bfloat16") if "norm" in case.arrays)
    assert op.unsupported(**case.arguments()) is None
    wide = case.arguments() | {"norm": case.arrays["norm"].astype(mx.float32)}
    assert "norm is mlx.core.float32" in op.unsupported(**wide)
