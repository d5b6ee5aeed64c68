"""One op on one case: the kernel's answer beside the op's meaning in float32. Knows no op by name and no device.

Tests, `mlxrt doctor` and the first load on a new machine all judge kernels by this.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from .dispatch import Gpu
from .ops.kv_quant import Packed
from .registry import OPS, Case, Op

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
SMALL_FLOATS = (mx.float16, mx.bfloat16)


@dataclass(frozen=True)
class Proof:
    """`error`: the largest difference, relative to the truth's largest number; inf for a NaN, a wrong shape or type."""

    error: float
    told: str

    def holds(self, tolerance: float) -> bool:
        return self.error <= tolerance


def with_kernels() -> dict[str, Op]:
    return {name: op for name, op in OPS.items() if op.launch is not None}


def cases_of(op: Op, dtype: str, large: bool = False) -> list[Case]:
    """An op's cases in order; `large`: also those too slow for a simulator. The global random state stays as it was."""
    state: Any = mx.random.state
    high, low = state[0].tolist()
    try:
        return [case for case in op.cases(DTYPES[dtype]) if large or not case.large]
    finally:
        mx.random.seed(high << 32 | low)  # a seed is the two words of the state


def widened(value: Any) -> Any:
    """Every float16 and bfloat16 in it as float32, also inside dataclasses such as QuantizedMatrix."""
    if isinstance(value, mx.array):
        return value.astype(mx.float32) if value.dtype in SMALL_FLOATS else value
    if isinstance(value, mx.Dtype):
        return mx.float32 if value in SMALL_FLOATS else value
    if isinstance(value, Packed):
        return value.widened()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: widened(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    if isinstance(value, (list, tuple)):
        return type(value)(map(widened, value))
    return {k: widened(v) for k, v in value.items()} if isinstance(value, dict) else value


def truth(op: Op, case: Case) -> Any:
    with mx.stream(mx.cpu):  # a GPU's float32 products may round as TF32 does
        found = op.reference(**widened(case.arguments()))
        mx.eval(found)
    return found


def prove(op: Op, case: Case, gpu: Gpu, expected: Any) -> Proof:
    assert op.launch is not None
    return compare(op.launch(gpu, **case.arguments()), op.reference(**case.arguments()), expected)


def compare(got: Any, plain: Any, expected: Any) -> Proof:
    """`plain` is the reference at the case's own dtype: it says which types the answer must have."""
    ours, types, right = (dict(leaves(x)) for x in (got, plain, expected))
    if ours.keys() != right.keys():
        return Proof(float("inf"), f"outputs {sorted(ours)}, expected {sorted(right)}")
    worst = Proof(0.0, "")
    for name, x in ours.items():
        label = f"output {name}" if name else "the output"
        if x.shape != right[name].shape or x.dtype != types[name].dtype:
            found, wanted = f"{x.shape} {x.dtype}", f"{right[name].shape} {types[name].dtype}"
            return Proof(float("inf"), f"{label} is {found}, expected {wanted}")
        error = difference(x, right[name])
        if error > worst.error:
            worst = Proof(error, f"{label} is off by {error:.3g} of its largest number")
    return worst


def leaves(x: Any) -> list[tuple[str, mx.array]]:
    found: Any = [("", x)] if isinstance(x, mx.array) else tree_flatten(opened(x))
    return found


def opened(x: Any) -> Any:
    """Codes apart from their scales and biases: those must be equal, these may round differently."""
    if isinstance(x, Packed):
        return x.layout.split(x.words)
    return type(x)(map(opened, x)) if isinstance(x, (list, tuple)) else x


def difference(x: mx.array, right: mx.array) -> float:
    if x.size == 0:
        return 0.0
    if not mx.issubdtype(x.dtype, mx.floating):
        return 0.0 if mx.array_equal(x, right) else float("inf")
    x, right = x.astype(mx.float32), right.astype(mx.float32)
    same = mx.logical_and(mx.isinf(right), x == right)  # an expected infinity has to be one
    error = mx.where(same, 0.0, mx.abs(x - right)).max()
    largest = mx.where(mx.isinf(right), 0.0, mx.abs(right)).max()
    found = float(error / mx.maximum(largest, 1e-30))
    return found if found == found else float("inf")  # a NaN compares with nothing
