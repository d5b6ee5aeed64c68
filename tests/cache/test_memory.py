"""In place where it must be, nothing copied by launching ahead, one trace for many steps."""

import dataclasses

import mlx.core as mx
import pytest

from mlxrt import Engine, EngineConfig, Request, SamplingParams
from mlxrt.cache.memory.paged import KVView
from mlxrt.cache.memory.slices import bucket, extend, pad_table, update
from mlxrt.engine import model_runner
from mlxrt.kernels.ops import kv_codec
from mlxrt.kernels.ops.kv_codec import QuantizedKV
from tests.engine.test_few_states import WideHybrid
from tests.support.ahead_memory import measure_peak, measure_prefill_peak
from tests.support.oracle import truth, truths
from tests.support.toy_models import CONFIG, KINDS, make


def ask(prompt, n):
    return Request(tokens=tuple(prompt), params=SamplingParams(max_tokens=n))


def large(model, blocks, **options):
    """An engine whose pools are far larger than a step, as they are in use."""
    engine = Engine(model, EngineConfig(**options))
    held = [g.pool.allocate(blocks) for g in engine.core.pools.groups]
    list(engine.stream(ask(range(8), 2)))
    del held
    assert all(g.pool.size > blocks for g in engine.core.pools.groups)
    return engine


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("ahead", [1, 2])
def test_decode_ahead_never_copies_the_pool(compiled, ahead):
    engine = large(make("f", size=16), 4096, compile=compiled, ahead=ahead)
    pool = sum(p.nbytes for p in engine.core.pools.arrays[0])
    stream = engine.stream(ask(range(20), 64))
    for _ in range(4):
        next(stream)
    mx.synchronize()
    mx.reset_peak_memory()
    base = mx.get_active_memory()
    for _ in stream:
        continue
    assert pool > 32e6 and mx.get_peak_memory() - base < pool / 4


@pytest.mark.parametrize("bits", [4, 8])
def test_kv_is_dequantized_where_mlx_cannot_multiply_it(bits, monkeypatch):
    """CUDA's quantized_matmul refuses most batches of small matrices."""
    mx.random.seed(bits)
    kept = QuantizedKV(bits, bits, 32)
    parts = [a.swapaxes(0, 1)[None] for a in kept.encode(*mx.random.normal((2, 40, 3, 64)))]  # [1, heads, 40, width]
    q, weights = mx.random.normal((1, 3, 2, 64)), mx.softmax(mx.random.normal((1, 3, 2, 40)), axis=-1)
    expected = kept.score(q, parts), kept.mix(weights, parts)
    monkeypatch.setattr(kv_codec, "backend", lambda: "cuda")
    monkeypatch.setattr(mx, "quantized_matmul", None)
    for a, b in zip(expected, (kept.score(q, parts), kept.mix(weights, parts))):
        assert a.shape == b.shape and a.dtype == b.dtype and mx.allclose(a, b, atol=1e-4)


def test_chunks_write_the_pool_in_place():
    engine = large(make("f", size=16), 4096, chunk=16)
    stream = engine.stream(ask(range(90), 2))
    mx.synchronize()
    mx.reset_peak_memory()
    base = mx.get_active_memory()
    next(stream)
    assert mx.get_peak_memory() - base < engine.core.pools.arrays[0][0].nbytes / 4


def test_chunks_write_recurrent_states_in_place():
    """Every chunk reads the states that the one before it wrote: MLX copies a pool that still has a reader."""
    mx.random.seed(0)
    model = WideHybrid(dataclasses.replace(CONFIG, num_hidden_layers=2, windows=(None,) * 2))
    model.fuse()
    engine = large(model, 2000, chunk=16)
    stream = engine.stream(ask(range(60), 2))
    mx.synchronize()
    mx.reset_peak_memory()
    base, pool = mx.get_active_memory(), engine.core.pools.arrays[0][1].nbytes
    next(stream)
    assert pool > 8e6 and mx.get_peak_memory() - base < pool / 4


def test_steps_wait_only_to_write_the_pool():
    engine = Engine(make("f"))
    engine.generate(ask(range(20), 64))
    moves = 2  # the pool of 4-token blocks grows
    assert engine.core.runner.waits <= 1 + 64 // 16 + moves


def test_layers_that_share_memory_have_none():
    engine = Engine(make("wfsw"))
    assert engine.core.runner.kv_layer == [0, 1, 1, 3] and len(engine.core.pools.arrays) == 3


def test_one_trace_serves_many_steps():
    traced = []
    model = make("wfs")
    inner = type(model).__call__
    type(model).__call__ = lambda self, *a: traced.append(1) or inner(self, *a)
    engine = Engine(model, EngineConfig(compile=True))
    got = engine.generate([ask((1, 2, 3), 40), ask((4, 5, 6, 7), 40)])
    steps = len(traced)
    answers = [c.tokens for c in got]
    assert answers == truths(model, [(1, 2, 3), (4, 5, 6, 7)], 40, answers)
    # one prefill; then tables of 1, 2, 4, 8, 16 blocks, each perhaps with a grown pool; flushes do not trace
    assert steps <= 1 + 5 + 2


@pytest.mark.parametrize("kind", ["full", "window", "rotating-keep"])
@pytest.mark.parametrize("lengths", [(37,), (64,), (100, 41, 250)])
def test_a_block_table_does_not_widen_within_a_tail(kind, lengths, monkeypatch):
    """Another width is another step: compiled anew, and captured anew as a graph."""
    widths, decode_batch = {}, model_runner.decode_batch

    def record(step, groups, tail, *rest):
        batch, index, tables = decode_batch(step, groups, tail, *rest)
        widths.setdefault(tuple(tail.starts), set()).add(tuple(where["table"].shape for where in index))
        return batch, index, tables

    monkeypatch.setattr(model_runner, "decode_batch", record)
    model = KINDS[kind]()
    prompts = [tuple((i * 7 + n) % 90 for i in range(n)) for n in lengths]
    answers = Engine(model, EngineConfig(compile=True)).generate([ask(p, 90) for p in prompts])
    assert [c.tokens for c in answers] == truths(model, prompts, 90, [c.tokens for c in answers])
    assert len(widths) >= 3 and all(len(shapes) == 1 for shapes in widths.values())


def test_pools_start_small_and_grow_on_the_way():
    model = make("wf")
    engine = Engine(model)
    small = engine.stats().kv_allocated
    prompt = tuple(i % 90 for i in range(300))
    done = engine.generate(ask(prompt, 8))
    assert done.tokens == truth(model, prompt, 8)
    assert engine.stats().kv_allocated > small


def test_dtypes_are_kept():
    model = make("wf")
    model.set_dtype(mx.bfloat16)
    engine = Engine(model)
    engine.generate(ask(range(9), 20))
    assert {p.dtype for pool in engine.core.pools.arrays.values() for p in pool} == {mx.bfloat16}
    x = model.model.embed_tokens(mx.array([1, 2]))
    assert model.model.layers[0].mlp(x).dtype == mx.bfloat16


def test_update_leaves_its_argument_alone_and_refuses_other_dtypes():
    a = mx.zeros((3, 2))
    b = update(a, mx.array([1]), mx.ones((1, 2)))
    assert a.sum().item() == 0 and b.sum().item() == 2
    with pytest.raises(TypeError, match="float32"):
        update(a, mx.array([1]), mx.ones((1, 2), mx.bfloat16))


def test_extend_pad_table_bucket():
    assert extend(mx.ones((2, 3)), 5).tolist() == [[1, 1, 1]] * 2 + [[0, 0, 0]] * 3
    assert pad_table([[1, 2], [3]], 3, 4).tolist() == [[1, 2, 0, 0], [3, 0, 0, 0], [0, 0, 0, 0]]
    assert [bucket(n) for n in (0, 1, 2, 3, 4, 5, 9)] == [1, 1, 2, 4, 4, 8, 16]


def test_a_prompt_that_begins_early_allocates_no_second_cache(monkeypatch):
    released = []
    monkeypatch.setattr(KVView, "release", lambda view: released.append(view))
    peak, pool = measure_prefill_peak()
    assert peak < pool / 4 and released


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_decode_launched_ahead_allocates_no_second_cache(ahead):
    peak, pool = measure_peak(ahead)
    assert peak < pool / 4
