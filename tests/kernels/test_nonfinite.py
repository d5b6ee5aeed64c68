"""A NaN stays where it belongs: kernels read no slot that their row does not see, and rows do not mix."""

import os
from collections.abc import Iterator
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mlxrt.kernels import OPS, Case, make_gpu
from mlxrt.kernels.dtypes import DTYPES
from mlxrt.kernels.ops.attention_layout import PackedKV, QuantizedPages
from mlxrt.kernels.selftest import compute_reference, list_cases

from ..support.kernels.cases import all_cases
from ..support.metal_sim import Simulator
from ..support.poison import poison

EVERYTHING = os.environ.get("MLXRT_KERNEL_CASES") == "all"
TAKEN = {  # op -> dtype -> numbers of cases
    "paged_attention": {"float32": (0, 1, 3, 13), "bfloat16": (5, 6, 15)},
    "quantized_paged_attention": {"float32": (0,), "float16": (6, 13)},
    "qkv_attention": {"float32": (0,), "bfloat16": (1,)},
}
ROWS = ("qmv", "qmm", "moe_router", "moe_gate_up", "moe_down", "moe_grouped", "moe_combine")


def unseen_slots(pages, window: int | None, keep: int, new_token: bool) -> tuple[np.ndarray, np.ndarray]:
    """Of the pool [blocks, slots] and of the tail [rows, slots], those that no row may read."""
    raw = pages.raw
    table, ranges = np.array(raw.table), np.array(raw.row_range)
    pool, size = np.ones((raw.pool.shape[0], raw.pool.shape[2]), bool), raw.pool.shape[2]
    tail = np.ones((raw.tail.shape[0], raw.tail.shape[2]), bool)
    for row, (base, start, used) in enumerate(ranges):
        first = 0 if window is None else start + used - window + 1
        for position in {*range(min(keep, start)), *range(max(base, first), start)}:
            column = (position if position < keep else position - base) // size
            pool[table[row, column], position % size] = False
        end = used if new_token else used + 1
        tail[row, max(0, first - start) : end] = False
        tail[row, : min(max(0, keep - start), end)] = False
    return pool, tail


def poison_unseen(case: Case) -> tuple[Case, np.ndarray]:
    """The case with NaN in every such slot; and the slots of the tail that hold something."""
    pages, layout = case.options["pages"], case.options["layout"]
    made = case.arrays["qkv"].shape[1] if "qkv" in case.arrays else case.options["matrix"].rows
    reads = made == layout.num_heads * layout.head_dim
    pool, tail = unseen_slots(pages, case.options.get("window"), case.options.get("keep", 0), not reads)

    def fill(array: mx.array, slots: np.ndarray) -> mx.array:
        return mx.where(mx.array(slots)[:, None, :, None], poison((1, 1, 1, 1), array.dtype), array)

    raw = pages.raw
    filled = fill(raw.pool, pool), fill(raw.tail, tail)
    if isinstance(pages, QuantizedPages):
        filled = tuple(PackedKV(words, pages.codec) for words in filled)
    poisoned = replace(pages, pool=filled[0], tail=filled[1])
    return Case(case.name, case.arrays, case.options | {"pages": poisoned}), ~tail


def chosen() -> Iterator:
    """By lanes and by matrix units, with a window, tokens kept before it, reading only, quantised, with the projection;
    or every case."""
    for name, taken in TAKEN.items():
        for dtype in DTYPES:
            cases = [case for case in list_cases(OPS[name], dtype) if not OPS[name].unsupported(**case.arguments())]
            for i in range(len(cases)) if EVERYTHING else taken.get(dtype, ()):
                yield pytest.param(name, cases[i], id=f"{name}-{dtype}-{cases[i].name}")


@pytest.mark.parametrize(("name", "case"), list(chosen()))
def test_attention_reads_no_slot_its_row_does_not_see(name, case):
    op, (poisoned, kept) = OPS[name], poison_unseen(case)
    expected = np.array(compute_reference(op, case)[0].astype(mx.float32))
    sim = Simulator(portable=True)
    for out, *_ in (
        op.launch(make_gpu("metal", sim.metal_kernel), **poisoned.arguments()),
        compute_reference(op, poisoned),
    ):
        found = np.array(out.astype(mx.float32))
        assert np.isfinite(found).all()
        assert np.abs(found - expected).max() <= 0.03 * np.abs(expected).max()
    assert sim.launches and not kept.all()


@pytest.mark.parametrize("name", ROWS)
def test_a_row_that_overflowed_leaves_the_others_alone(name):
    op = OPS[name]
    rows = "parts" if name == "moe_combine" else "x"
    case = next(c for c in all_cases(op, "bfloat16") if c.arrays[rows].shape[0] > 1)
    spoiled = mx.concatenate([mx.full(case.arrays[rows][:1].shape, mx.nan).astype(mx.bfloat16), case.arrays[rows][1:]])
    bad = Case(case.name, case.arrays | {rows: spoiled.astype(case.arrays[rows].dtype)}, case.options)
    gpu = make_gpu("metal", Simulator(portable=True).metal_kernel)
    clean, found = (op.launch(gpu, **c.arguments()) for c in (case, bad))
    for a, b in zip(*((x,) if isinstance(x, mx.array) else x for x in (clean, found))):
        a, b = (np.array(x.astype(mx.float32)).reshape(x.shape[0], -1) for x in (a, b))
        differ = (a != b).any(axis=1)
        assert not differ.all() and not differ[-1], differ
        assert name == "moe_router" or np.isnan(b[differ]).any(axis=1).all()
