"""The ways round MLX's defects compute what MLX should. What MLX gets wrong is seen on a GPU only (tests/gpu)."""

import os
from pathlib import Path

import mlx.core as mx
import pytest

import mlxrt
from mlxrt.kernels import mlx_defects

PACKAGE = Path(mlxrt.__file__).parent


@pytest.fixture(params=["here", "as on cuda", "as on cuda, too large"])
def gather_mm(request, monkeypatch):
    if request.param != "here":
        monkeypatch.setattr(mlx_defects, "backend", lambda: "cuda")
    if request.param.endswith("large"):
        monkeypatch.setattr(mlx_defects, "MAX_SORTED_BYTES", 1)
    return mlx_defects.gather_mm


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

    monkeypatch.setattr(mlx_defects, "backend", lambda: "cuda")
    x, ids = mx.zeros((3, 1, 4)), mx.zeros(3, mx.uint32)
    stack = mx.zeros((2, 4, 8))
    monkeypatch.setattr(mlx_defects, "mx", Core)
    for largest in (stack.nbytes, stack.nbytes - 1):
        monkeypatch.setattr(mlx_defects, "MAX_SORTED_BYTES", largest)
        mlx_defects.gather_mm(x, stack, ids, ordered=True)
    assert asked == [True, False]


@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (2, 5)])
def test_a_cumulative_sum_of_one_element_is_not_launched(monkeypatch, shape):
    """On CUDA that launch would write outside of its buffer."""
    x, calls = mx.random.normal(shape), []
    right, scan = mx.cumsum(x, axis=-1), mx.cumsum
    monkeypatch.setattr(mx, "cumsum", lambda x, axis: calls.append(x.shape) or scan(x, axis=axis))
    assert mx.array_equal(mlx_defects.cumsum(x), right)
    assert calls == ([shape] if shape[-1] > 1 else [])


@pytest.mark.parametrize("periods", [False, True])
@pytest.mark.parametrize("dims", [2, 4, 6, 8, 12, 16, 24, 30, 32, 64])
@pytest.mark.parametrize("rows", [1, 32, 64, 150])
def test_rope_of_few_pairs_is_launched_with_a_longer_axis(monkeypatch, rows, dims, periods):
    """MLX fills a block of 1,024 threads with pairs, then length, then rows: 16 of the first leave 64 for the last."""
    x, offset, launched = mx.random.normal((rows, 6, 1, 64)), mx.arange(rows) * 3, []
    freqs = 100.0 ** (mx.arange(dims // 2) / (dims // 2)) if periods else None
    given = dict(base=None if periods else 100.0, scale=0.5, offset=offset, freqs=freqs)
    right, rope = mx.fast.rope(x, dims, traditional=False, **given), mx.fast.rope
    monkeypatch.setattr(mlx_defects, "backend", lambda: "cuda")
    monkeypatch.setattr(mx.fast, "rope", lambda x, *a, **k: launched.append(x.shape) or rope(x, *a, **k))
    got = mlx_defects.fast_rope(x, dims, **given)
    assert got.shape == right.shape and got.dtype == right.dtype and mx.array_equal(got, right)
    [(_, _, length, _)] = launched
    assert threads_in_z(dims // 2, length, 2 * rows) <= 64
    assert length == 1 or threads_in_z(dims // 2, 1, 2 * rows) > 64


def threads_in_z(*axes):
    """Of a block, as MLX 0.32.4 divides it: each axis in turn doubles while it is longer, up to 1,024 in all."""
    powers = [0, 0, 0]
    while True:
        before = sum(powers)
        for i, n in enumerate(axes):
            powers[i] += n >= 2 << powers[i]
            if sum(powers) == 10:
                return 1 << powers[2]
        if sum(powers) == before:
            return 1 << powers[2]


@pytest.mark.parametrize(
    ("set_to", "late", "said"),
    [
        (None, False, None),
        ("0", False, None),
        ("1", False, "MLX_ENABLE_TF32=1 asks for that; unset it"),
        (None, True, "MLX had multiplied before MLX_ENABLE_TF32=0 could be set; set it before starting"),
    ],
)
def test_float32_is_asked_to_be_exact_where_the_user_has_not_chosen(monkeypatch, set_to, late, said):
    monkeypatch.setenv("MLX_ENABLE_TF32", set_to or "")
    if set_to is None:
        monkeypatch.delenv("MLX_ENABLE_TF32")
    monkeypatch.setattr(mlx_defects, "backend", lambda: "cuda")
    monkeypatch.setattr(mlx_defects, "float32_is_exact", lambda: os.environ["MLX_ENABLE_TF32"] == "0" and not late)
    answer = mlx_defects.ask_for_exact_float32()
    assert answer is None if said is None else answer.startswith(said)
    assert os.environ["MLX_ENABLE_TF32"] == (set_to or "0")


def test_float32_products_are_found_exact_on_a_cpu():
    assert mlx_defects.float32_is_exact()


def test_what_has_a_way_round_is_called_through_it():
    calls = ("mx.cumsum(", "mx.fast.rope(", "mx.gather_mm(")
    direct = [
        f"{path.relative_to(PACKAGE)}: {call}"
        for path in PACKAGE.rglob("*.py")
        for call in calls
        if path.name != "mlx_defects.py" and call in path.read_text(encoding="utf-8")
    ]
    assert not direct
