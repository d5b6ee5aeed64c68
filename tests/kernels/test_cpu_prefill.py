"""Attention in C of steps with prompts: the bits of a token alone, in whatever company, and of a decode step."""

import mlx.core as mx
import numpy as np
import pytest

from mlxrt.kernels.cpu.library import CpuKernels
from mlxrt.kernels.ops.attention_layout import PackedKV, Pages, PrefillPages, QuantizedPages
from mlxrt.kernels.ops.prefill_attention import SHAPES, prefill_cases

from ..support.kernels.cpu_library import compiled_library

pytestmark = pytest.mark.xdist_group("cpu_kernels")  # one worker compiles the library

CASES = {str(shape[:5]): i for i, shape in enumerate(SHAPES)}


@pytest.fixture(scope="module")
def cpu() -> CpuKernels:
    return CpuKernels(compiled_library(), threads=2)


@pytest.fixture(params=CASES.values(), ids=CASES)
def case(request):
    return list(prefill_cases(mx.float32))[request.param]


def take(pages: PrefillPages, some: list[int]) -> PrefillPages:
    chosen = mx.array(some)
    return PrefillPages(pages.pool, pages.table, pages.row[chosen], pages.row_range[chosen])


def test_a_token_alone_gets_the_same_bits(cpu, case):
    options, qkv = dict(case.options), case.arrays["qkv"]
    pages = options.pop("pages")
    sinks = case.arrays.get("sinks")
    together = np.array(cpu.attend_prefill(qkv, pages=pages, sinks=sinks, **options))
    order = np.random.default_rng(1).permutation(qkv.shape[0]).tolist()
    for some in [[i] for i in order[:6]] + [order, order[3:8], list(range(2, qkv.shape[0]))]:
        found = cpu.attend_prefill(qkv[mx.array(some)], pages=take(pages, some), sinks=sinks, **options)
        assert np.array_equal(found, together[some])


def test_a_decode_step_gets_the_same_bits(cpu, case):
    """The newest tokens of its row in a tail, the rest in blocks."""
    options, qkv = dict(case.options), case.arrays["qkv"]
    pages, layout, sinks = options.pop("pages"), options["layout"], case.arrays.get("sinks")
    new = qkv.shape[1] > layout.num_heads * layout.head_dim
    if new:  # the pool has what the step's own tokens make
        made, finite = cpu.encode_kv(qkv, layout, pages)
        assert finite.all().item()
        slots = made.words if isinstance(made, PackedKV) else made
        pool, size = np.array(pages.raw_pool), pages.block_size
        for i, (row, (base, at, _)) in enumerate(zip(pages.row.tolist(), pages.row_range.tolist())):
            pool[pages.table[row, (at - base) // size].item(), :, at % size] = np.array(slots[i])
        held = mx.array(pool)
        pages = PrefillPages(pages.wrap(held), pages.table, pages.row, pages.row_range)
    together = np.array(cpu.attend_prefill(qkv, pages=pages, sinks=sinks, **options))
    for i in range(qkv.shape[0]):
        row, (base, at, _) = pages.row[i].item(), pages.row_range[i].tolist()
        used = min(i % 3, at - base)
        tail = mx.zeros((1, pages.raw_pool.shape[1], 4, pages.raw_pool.shape[3]), pages.raw_pool.dtype)
        for k in range(used + (not new)):
            at_k = at - used + k
            block = pages.table[row, (at_k - base) // pages.block_size]
            tail[0, :, k] = pages.raw_pool[block, :, at_k % pages.block_size]
        where = mx.array([[base, at - used, used]])
        if isinstance(pages.pool, PackedKV):
            given = QuantizedPages(pages.pool, PackedKV(tail, pages.pool.codec), pages.table[row][None], where)
        else:
            given = Pages(pages.pool, tail, pages.table[row][None], where)
        out, _ = cpu.attend(qkv[i : i + 1], pages=given, sinks=sinks, **options)
        assert np.array_equal(out[0], together[i])


def test_what_is_not_finite_is_said(cpu):
    case = next(c for c in prefill_cases(mx.float32) if isinstance(c.options["pages"].pool, PackedKV))
    qkv, layout = case.arrays["qkv"], case.options["layout"]
    width = layout.num_heads * layout.head_dim
    qkv[3, width + 1], qkv[5, -1], qkv[6, 0] = mx.nan, -mx.inf, mx.nan  # a key, a value, a query
    _, finite = cpu.encode_kv(qkv, layout, case.options["pages"])
    assert [i for i, fine in enumerate(finite.tolist()) if not fine] == [3, 5]
