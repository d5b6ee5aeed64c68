"""Functions of kernels/metal on their own, against whole numbers of any size.

A token hardly ever shows the last bits of what draw.h computes. These ops do; none of them is registered.
"""

from dataclasses import dataclass
from itertools import product

import mlx.core as mx

from mlxrt.kernels import Case, Op
from mlxrt.kernels.metal_source import load
from mlxrt.kernels.ops.draw import weigh

from .inline_source import InlineSource

LOW = 2**32 - 1
NUMBERS = (0, 1, 2**31, LOW, 2**40, 2**40 + 2**31 + 1, 0x123456789ABCDEF, 2**57 + 0x9E3779B9, 2**64 - 1)
SHARES = (1, 3, 2**31, 0xE6666666, LOW)


@dataclass(frozen=True)
class FunctionSource(InlineSource):
    """A text that calls what a file of kernels/metal calls."""

    of: str = ""

    @property
    def helpers(self) -> str:
        return load(self.of).helpers


ARITHMETIC = FunctionSource(
    "draw_arithmetic",
    ("numbers", "gaps"),
    ("found", "weights"),
    text="""
    uint i = thread_position_in_grid.x;
    ulong a = (ulong(numbers[5 * i + 1]) << 32) | numbers[5 * i];
    ulong b = (ulong(numbers[5 * i + 3]) << 32) | numbers[5 * i + 2];
    ulong high = multiply_high64(a, b);
    ulong share = share_of(a, numbers[5 * i + 4]);
    found[6 * i] = uint(high);
    found[6 * i + 1] = uint(high >> 32);
    found[6 * i + 2] = uint(share);
    found[6 * i + 3] = uint(share >> 32);
    found[6 * i + 4] = points_at(a, b, ulong(numbers[5 * i + 4])) ? 1 : 0;
    found[6 * i + 5] = uint(metal::min(a, b)) ^ uint(metal::min(a, b) >> 32);
    ulong weight = weigh(gaps[i]);
    weights[2 * i] = uint(weight);
    weights[2 * i + 1] = uint(weight >> 32);
    """,
    of="draw.metal",
)


def arithmetic_cases(dtype):
    asked = [(a, b, SHARES[i % len(SHARES)]) for i, (a, b) in enumerate(product(NUMBERS, NUMBERS))]
    asked += [(n + share, n, share) for n in (5, 2**40) for share in SHARES]  # just past what it points at
    numbers = [(a & LOW, a >> 32, b & LOW, b >> 32, share) for a, b, share in asked]
    gaps = mx.arange(len(asked)) * 0.4637
    yield Case("whole numbers", {"numbers": mx.array(numbers, mx.uint32), "gaps": gaps})


def compute_arithmetic(numbers, gaps):
    found = []
    for a_low, a_high, b_low, b_high, share in numbers.tolist():
        a, b = a_high << 32 | a_low, b_high << 32 | b_low
        high, part, least = a * b >> 64, a * share >> 32, min(a, b)
        inside = (a - b) % 2**64 < share
        found.append([high & LOW, high >> 32, part & LOW, part >> 32, inside, least & LOW ^ least >> 32])
    return mx.array(found, mx.uint32), weigh(gaps).view(mx.uint32).reshape(-1, 2)


def launch_arithmetic(gpu, numbers, gaps):
    n = gaps.size
    return gpu(ARITHMETIC, [numbers, gaps], 1, n, [((n, 6), mx.uint32), ((n, 2), mx.uint32)])


DRAW_ARITHMETIC = Op("draw_arithmetic", compute_arithmetic, arithmetic_cases, {"float32": 0.0, "bfloat16": 0.0})
DRAW_ARITHMETIC.kernel(ARITHMETIC)(launch_arithmetic)
FUNCTION_OPS = {op.name: op for op in (DRAW_ARITHMETIC,)}
