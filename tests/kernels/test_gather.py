"""Rows by the matrices of a stack: every way is the product one by one. What MLX gets wrong on CUDA is seen there only
(tests/gpu/test_experts.py)."""

import mlx.core as mx
import pytest

from mlxrt.kernels.ops import gather


@pytest.fixture(params=["here", "as on cuda", "as on cuda, too large"])
def gather_mm(request, monkeypatch):
    if request.param != "here":
        monkeypatch.setattr(gather, "backend", lambda: "cuda")
    if request.param.endswith("large"):
        monkeypatch.setattr(gather, "LARGEST", 1)
    return gather.gather_mm


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
def test_each_row_is_multiplied_by_its_own_matrix(gather_mm, ordered, late):
    mx.random.seed(4)
    x, weight = mx.random.normal((9, 32)), mx.random.normal((5, 16, 32))
    pick, ids = mx.random.randint(0, 9, (40,)), mx.random.randint(0, 5, (40,)).astype(mx.uint32)
    ids = mx.sort(ids) if ordered else ids
    rows = x[pick][:, None] if late else x[:, None][pick]
    got = gather_mm(rows, weight.swapaxes(-1, -2), ids, ordered=ordered)
    assert got.shape == (40, 1, 16) and got.dtype == mx.float32
    right = mx.stack([weight[int(e)] @ x[int(i)] for e, i in zip(ids.tolist(), pick.tolist())])
    assert mx.allclose(got[:, 0], right, atol=1e-5)


def test_a_stack_that_is_too_large_is_not_promised_to_be_in_order(monkeypatch):
    asked = []

    class Core:
        @staticmethod
        def gather_mm(x, stack, rhs_indices, sorted_indices):
            asked.append(sorted_indices)
            return x

    monkeypatch.setattr(gather, "backend", lambda: "cuda")
    x, ids = mx.zeros((3, 1, 4)), mx.zeros(3, mx.uint32)
    stack = mx.zeros((2, 4, 8))
    monkeypatch.setattr(gather, "mx", Core)
    for largest in (stack.nbytes, stack.nbytes - 1):
        monkeypatch.setattr(gather, "LARGEST", largest)
        gather.gather_mm(x, stack, ids, ordered=True)
    assert asked == [True, False]
