"""Arrays in one buffer: the same numbers, no second copy, one input of a launch, the same answers."""

import dataclasses

import mlx.core as mx
import pytest

from mlxrt.kernels import OPS, QuantizedMatrix, make_gpu
from mlxrt.kernels.constant_buffer import ALIGNMENT, TYPE_NAMES, pack_arrays
from mlxrt.kernels.selftest import check_case, compute_reference

from ..support.kernels.cases import EVERYTHING, all_cases
from ..support.metal_sim import Simulator

CONSTANT = (
    "norm",
    "bias",
    "weight",
    "signs",
    "codebook",
    "indices",
    "correction",
    "scales",
    "post",
    "a_log",
    "dt_bias",
)
# Ops with fewer than two arrays that a model holds: nothing to put together.
AT_MOST_ONE = (
    *("add_norm", "argmax", "concat_columns", "draw", "hadamard", "moe_combine", "moe_sort", "top_logprobs"),
)


class Counting(Simulator):
    """Remembers how many inputs each launch had."""

    def __init__(self):
        super().__init__(portable=True)
        self.inputs = []

    def metal_kernel(self, **definition):
        made = super().metal_kernel(**definition)

        def call(*, inputs, **rest):
            self.inputs.append(len(inputs))
            return made(inputs=inputs, **rest)

        return call


@pytest.mark.parametrize("sizes", [(1, 64, 3), (7, 1, 129), (256,), (300, 2)])
def test_numbers_and_types_stay(sizes):
    arrays = [mx.arange(n).astype(dtype).reshape(1, n) for n in sizes for dtype in TYPE_NAMES]
    packed = pack_arrays(arrays)
    for a, place in zip(arrays, packed):
        assert place.array.dtype == a.dtype and place.array.shape == a.shape
        assert mx.array_equal(place.array, a)
        assert place.offset * 4 % ALIGNMENT == 0
        there = place.buffer[place.offset :].view(a.dtype)[: a.size].reshape(a.shape)
        assert mx.array_equal(there, a)


def test_views_hold_no_memory_of_their_own():
    arrays = [mx.random.normal((1 << 20,)), mx.random.normal((1 << 20,)).astype(mx.bfloat16)]
    mx.eval(arrays)
    mx.clear_cache()
    before = mx.get_active_memory()
    packed = pack_arrays(arrays)
    assert mx.get_active_memory() - before < 6.1 * (1 << 20)
    del arrays
    mx.clear_cache()
    assert mx.get_active_memory() - before < 0.1 * (1 << 20)
    assert len(packed) == 2


def test_a_lone_array_and_other_types_stay_where_they_are():
    gpu = make_gpu("metal", Simulator().metal_kernel)
    for arrays in ([mx.zeros(8)], [mx.zeros(8), mx.zeros(8, mx.int64)], [mx.zeros(8), mx.zeros(0)]):
        assert all(a is b for a, b in zip(arrays, gpu.pack_constants(arrays)))
    first = gpu.pack_constants([mx.zeros(8), mx.ones(8)])
    assert all(a is b for a, b in zip(first, gpu.pack_constants(first)))  # laid already


def constants(case):
    """What of a case a model holds: (path, array)."""
    found = [((name,), a) for name, a in case.arrays.items() if name in CONSTANT]
    for name, value in case.options.items():
        if dataclasses.is_dataclass(value) and not name.startswith("pages"):
            fields = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
            found += [((name, field), a) for field, a in fields if isinstance(a, mx.array)]
    return found


def pack_constants(case, gpu):
    """The case with all that a model holds in one buffer."""
    found = constants(case)
    arrays, options = dict(case.arrays), dict(case.options)
    for (path, _), a in zip(found, gpu.pack_constants([a for _, a in found])):
        if len(path) == 1:
            arrays[path[0]] = a
        else:
            options[path[0]] = dataclasses.replace(options[path[0]], **{path[1]: a})
    return dataclasses.replace(case, arrays=arrays, options=options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"] if EVERYTHING else ["bfloat16"])
@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.launch and name not in AT_MOST_ONE])
def test_ops_read_bundles_as_they_read_arrays(name, dtype):
    """`make test`: one case in bfloat16, `make test-kernels` several in both."""
    op = OPS[name]
    cases = all_cases(op, dtype, wide=False)
    several = [case for case in cases[:6] if len(constants(case)) > 1]
    assert several or not cases
    for case in several if EVERYTHING else several[:1]:
        sim = Counting()
        gpu = make_gpu("metal", sim.metal_kernel)
        plain = check_case(op, case, gpu, compute_reference(op, case))
        separate, sim.inputs = sim.inputs, []
        together = check_case(op, pack_constants(case, gpu), gpu, compute_reference(op, case))
        assert plain.within(op.tolerance[dtype]) and together.error == plain.error, together.message
        assert sum(sim.inputs) < sum(separate)
        assert not sim.errors()


def test_a_matrix_in_a_bundle_is_one_input():
    sim = Counting()
    gpu = make_gpu("metal", sim.metal_kernel)
    w = mx.random.normal((16, 64))
    matrix = QuantizedMatrix(*gpu.pack_constants(mx.quantize(w, 32, 4)), 4, 32, "affine")
    x = mx.random.normal((1, 64))
    y = OPS["qmv"].launch(gpu, x=x, matrix=matrix)
    assert sim.inputs == [2]
    assert mx.allclose(y, matrix.multiply(x), atol=1e-4)
