"""Rotary embedding against HF's frequencies and against the definition, in float64."""

import json
import math
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlxrt.errors import BadCheckpoint, UnsupportedModel
from mlxrt.kernels import QKVLayout, mlx_defects
from mlxrt.models.rope import RoPE, RopeParams, read_rope

CASES = json.loads((Path(__file__).parent / "rope.json").read_text())


def rotate(x, positions, inv_freq, magnitude):
    """The definition: pairs (i, i + D/2) rotated by position * frequency."""
    angle = positions[:, None] * np.array(inv_freq)[None]
    c, s = np.cos(angle)[:, None] * magnitude, np.sin(angle)[:, None] * magnitude
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * c - b * s, b * c + a * s], axis=-1)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["rope_parameters"]["rope_type"])
@pytest.mark.parametrize("spelling", ["v4", "v5"])
def test_like_hf(case, spelling):
    p = dict(case["rope_parameters"])
    raw = {"rope_parameters": p} if spelling == "v5" else {"rope_theta": p.pop("rope_theta"), "rope_scaling": p}
    rope = read_rope(raw, case["dim"], case["context"])
    positions = np.array([0, 1, 5, 100, 1000])
    x = np.random.default_rng(0).normal(size=(5, 3, case["dim"]))
    want = rotate(x, positions, case["inv_freq"], case["magnitude"])
    got = np.array(RoPE(rope)(mx.array(x, mx.float32), mx.array(positions)))
    # float32 angles at position 1000 carry 1000 * 2^-24 of error
    np.testing.assert_allclose(got, want, atol=5e-4)


def test_plain():
    x = np.random.default_rng(0).normal(size=(4, 2, 8))
    positions = np.array([3, 0, 7, 50])
    want = rotate(x, positions, [100.0 ** (-2 * i / 8) for i in range(4)], 1)
    got = RoPE(RopeParams(8, 100.0))(mx.array(x, mx.float32), mx.array(positions))
    np.testing.assert_allclose(np.array(got), want, atol=1e-5)


def test_the_dtype_is_kept():
    rope = read_rope({"rope_parameters": CASES[2]["rope_parameters"]}, CASES[2]["dim"], 4096)
    assert rope.magnitude != 1
    assert RoPE(rope)(mx.ones((1, 1, rope.dim), mx.bfloat16), mx.array([3])).dtype == mx.bfloat16


@pytest.mark.parametrize("dim", [2, 4, 6, 8, 12, 16, 30, 32, 64])
@pytest.mark.parametrize("rows", [3, 64, 300])
def test_cuda_can_launch_it(dim, rows, monkeypatch):
    """CUDA allows 64 threads of a block in z. MLX doubles x, y and z in turn while they fit, up to 1,024 threads."""
    blocks, plain_rope = [], mx.fast.rope

    def spy(x, dims, **options):
        sizes, block = (dims // 2, x.shape[2], x.shape[0] * -(-x.shape[1] // 4)), [1, 1, 1]
        while (larger := [i for i in range(3) if sizes[i] >= 2 * block[i]]) and math.prod(block) < 1024:
            for i in larger:
                block[i] *= 2 if math.prod(block) < 1024 else 1
        blocks.append(block)
        return plain_rope(x, dims, **options)

    monkeypatch.setattr(mx.fast, "rope", spy)
    mx.random.seed(dim)
    x, positions = mx.random.normal((rows, 6, 64)), mx.arange(rows) + 5
    expected = RoPE(RopeParams(dim, 100.0))(x, positions)
    monkeypatch.setattr(mlx_defects, "backend", lambda: "cuda")
    got = RoPE(RopeParams(dim, 100.0))(x, positions)
    assert mx.array_equal(got, expected) and got.shape == x.shape
    assert max(block[2] for block in blocks[1:]) <= 64
    assert dim > 16 or rows < 64 or blocks[0][2] > 64, "no case of the defect"


def test_layouts_rotate_as_models_do():
    """The reference of the kernels, in float32 with one rounding."""
    rope = RoPE(read_rope({"rope_parameters": CASES[2]["rope_parameters"]}, CASES[2]["dim"], 4096))
    layout = QKVLayout(3, 0, 128, **rope.constants())
    x, positions = mx.random.normal((5, 3, 128)), mx.array([0, 1, 5, 100, 1000])
    for dtype in (mx.float32, mx.bfloat16):
        got = layout.rotate(x.astype(dtype), positions)
        assert got.dtype == dtype
        expected = rope(x.astype(dtype).astype(mx.float32), positions).astype(dtype)
        assert mx.allclose(got, expected, atol=1e-4, rtol=0 if dtype == mx.float32 else 2**-8)


def test_dynamic_ends_where_it_would_change_the_past():
    rope = read_rope({"rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, 64, 2048)
    assert rope.limit == 2048 and rope.periods is None


def test_given_factors_stretch_the_periods():
    rope = read_rope({"rope_theta": 1e4, "rope_freq_factors": [1, 2, 4, 8]}, 8, 2048)
    assert rope.periods == tuple(1e4 ** (2 * i / 8) * f for i, f in enumerate([1, 2, 4, 8]))


@pytest.mark.parametrize(
    "raw, error, words",
    [
        ({}, BadCheckpoint, "rope_theta"),
        ({"rope_parameters": {"rope_type": "default"}}, BadCheckpoint, "rope_theta"),
        ({"rope_theta": "x"}, BadCheckpoint, "rope_theta"),
        ({"rope_theta": math.nan}, BadCheckpoint, "rope_theta"),
        ({"rope_theta": 1e4, "rope_scaling": 3}, BadCheckpoint, "rope_scaling"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "longrope"}}, BadCheckpoint, "longrope"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "odd"}}, UnsupportedModel, "odd"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "longrope", "short_factor": [1.0, 0]}}, BadCheckpoint, "short"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "su", "short_factor": [1.0]}}, BadCheckpoint, "numbers expected"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": ["x"]}}, UnsupportedModel, "rope scaling"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "linear"}}, BadCheckpoint, "factor"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "llama3", "factor": 8}}, BadCheckpoint, "low_freq_factor"),
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            UnsupportedModel,
            "partial",
        ),
        (
            {
                "rope_theta": 1e4,
                "rope_scaling": {"type": "linear", "factor": 2},
                "rope_parameters": {"rope_theta": 1e4},
            },
            BadCheckpoint,
            "contradict",
        ),
    ],
)
def test_nothing_is_guessed(raw, error, words):
    with pytest.raises(error, match=words):
        read_rope(raw, 8, 2048)
