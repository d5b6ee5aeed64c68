"""Our kernel text against MLX's own, which it writes without Metal while a function is exported."""

import mlx.core as mx
import pytest

from . import example
from .text import ATTRIBUTES, TYPES, Definition


def zeros(shape, dtype=mx.float32):
    return mx.zeros(shape, dtype)


def mlx_text(definition: Definition, inputs, dtypes, template, folder, capfd) -> str:
    kernel = mx.fast.metal_kernel(
        name=definition.name,
        input_names=definition.input_names,
        output_names=definition.output_names,
        source=definition.source,
        header=definition.header,
        atomic_outputs=definition.atomic_outputs,
    )

    def call(*given):
        return kernel(
            inputs=list(given),
            template=template,
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
            output_shapes=[(1,)] * len(dtypes),
            output_dtypes=dtypes,
            verbose=True,
        )

    capfd.readouterr()
    mx.export_function(str(folder / "kernel.mlxfn"), call, *inputs)
    told = capfd.readouterr().out
    return told[told.index("```\n") + 4 : told.rindex("\n```")]


MATVEC = Definition("qmv4", example.INPUTS, example.OUTPUTS, example.SOURCE)
MATVEC_INPUTS = example.operands(12, 64, 2, mx.bfloat16)[0]
SIZES = [("T", mx.bfloat16), ("M", 12), ("K", 64), ("GS", 64), ("ROWS", 4), ("NSG", 2)]
CASES = {
    "template": (
        Definition("k1", ("a",), ("o",), "o[thread_position_in_grid.x] = a[0];"),
        [zeros((4, 16))],
        [mx.float16],
        [("T", mx.bfloat16), ("N", -3), ("B", True), ("C", False)],
    ),
    "extras, atomics, header": (
        Definition(
            "k2",
            ("a", "b", "c"),
            ("o", "p"),
            "a_shape; b_strides; b_ndim; c_shape thread_index_in_simdgroup threadgroup_position_in_grid",
            "// header\n",
            True,
        ),
        [zeros((4,)), zeros((2, 3, 4), mx.uint8), zeros(())],
        [mx.float32, mx.int32],
        [],
    ),
    "no attribute": (Definition("k3", ("a",), ("o",), "o[0]=a[0];"), [zeros((8,), mx.int64)], [mx.bool_], []),
    "MLX's malformed list": (
        Definition("k4", ("a",), ("o", "p"), "a_shape"),
        [zeros((9,), mx.int8)],
        [mx.uint16, mx.uint64],
        [],
    ),
    "every attribute": (
        Definition("k5", ("a",), ("o",), " ".join(ATTRIBUTES)),
        [zeros((7,), mx.bfloat16)],
        [mx.complex64],
        [("T", mx.complex64)],
    ),
    "the example": (MATVEC, MATVEC_INPUTS, [mx.bfloat16], SIZES),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_text_is_mlx_s(case, tmp_path, capfd):
    definition, inputs, dtypes, template = case
    assert definition.text(inputs, dtypes, template).text == mlx_text(*case, tmp_path, capfd)


@pytest.mark.parametrize("dtype", TYPES, ids=TYPES.values())
def test_every_type_is_spelled_as_mlx_does(dtype, tmp_path, capfd):
    case = (Definition("t", ("a", "b"), ("o",), "thread_position_in_grid"), [zeros((9,), dtype), zeros((), dtype)])
    assert case[0].text(case[1], [dtype], [("T", dtype)]).text == mlx_text(
        *case, [dtype], [("T", dtype)], tmp_path, capfd
    )
