"""Attention in C over a quantised KV cache: what it writes is what mx.quantize makes, what it reads is that."""

import itertools

import mlx.core as mx
import numpy as np
import pytest

from mlxrt.kernels.cpu.library import CpuKernels
from mlxrt.kernels.ops.attention_layout import PackedKV, QKVLayout, QuantizedPages
from mlxrt.kernels.ops.kv_codec import KV_BITS, QuantizedKV
from mlxrt.kernels.ops.paged_attention import quantized_paged_attention

from ..engine.test_cpu_step import answer, write_model
from ..support.kernels.cpu_library import compiled_library

pytestmark = pytest.mark.xdist_group("cpu_kernels")  # one worker compiles the library

HEADS, KV_HEADS, DIM, SIZE = 4, 2, 64, 8
ODD = [0.0, -0.0, 1.0, -1.0, 1e-9, -1e-9, 3e4, -3e4]  # what whole groups of a key or value may be


@pytest.fixture(scope="module")
def cpu() -> CpuKernels:
    return CpuKernels(compiled_library(), threads=2)


def make_pages(codec: QuantizedKV, rows: int, start: list[int], used: int) -> QuantizedPages:
    blocks = 1 + max(start) // SIZE
    pool, tail = (
        PackedKV(codec.encode(*(mx.random.normal((count, KV_HEADS, slots, DIM)) for _ in range(2)))[0], codec)
        for count, slots in ((rows * blocks + 1, SIZE), (rows, 16))
    )
    table = mx.arange(1, rows * blocks + 1).reshape(rows, blocks).astype(mx.int32)
    return QuantizedPages(pool, tail, table, mx.array([[0, s, used] for s in start], mx.int32))


@pytest.mark.parametrize("bits", list(itertools.product(KV_BITS, KV_BITS)), ids=str)
def test_any_bits_are_those_of_the_reference(cpu, bits):
    mx.random.seed(sum(bits))
    codec, layout = QuantizedKV(*bits, 32), QKVLayout(HEADS, KV_HEADS, DIM)
    pages = make_pages(codec, 3, [19, 0, 5], 3)
    qkv = mx.random.normal((3, (HEADS + 2 * KV_HEADS) * DIM))
    out, tail = cpu.attend(qkv, layout, pages, 0.125)
    expected, packed = quantized_paged_attention.reference(qkv, layout, pages, 0.125)
    assert mx.array_equal(tail.words, packed.words).item()
    assert mx.abs(out - expected).max().item() < 2e-6 * mx.abs(expected).max().item() * DIM


@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("bits", KV_BITS)
def test_what_a_token_becomes_is_what_a_prompt_makes_of_it(cpu, bits, group):
    """Bit for bit, also where a group is one value or very small."""
    mx.random.seed(bits)
    layout, rows = QKVLayout(HEADS, KV_HEADS, DIM), 40
    scale = mx.array(10.0 ** np.random.default_rng(bits).integers(-9, 4, (rows, 1)), mx.float32)
    qkv = mx.random.normal((rows, (HEADS + 2 * KV_HEADS) * DIM)) * scale
    for i, value in enumerate(ODD):
        qkv[i, HEADS * DIM : HEADS * DIM + group] = value
        qkv[10 + i, -group:] = mx.round(qkv[10 + i, -group:]) * value
    pages = make_pages(QuantizedKV(bits, bits, group), rows, [0] * rows, 0)
    _, tail = cpu.attend(qkv, layout, pages, 0.125)
    k, v = (qkv[:, i * DIM :][:, : KV_HEADS * DIM].reshape(rows, KV_HEADS, DIM) for i in (HEADS, HEADS + KV_HEADS))
    assert mx.array_equal(tail.words[:, :, 0], pages.codec.encode(k, v)[0]).item()


@pytest.mark.parametrize("kv", ["q8", "q4", "k8v4"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_steps_are_recorded(cpu, tmp_path, family, kv):
    folder = write_model(tmp_path, family, head_dim=32)
    for params in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 5, "frequency_penalty": 0.3}):
        assert answer(folder, True, kv=kv, **params) == answer(folder, False, kv=kv, **params)
