"""The engine on a GPU: the right tokens for every cache kind, and no second KV cache from launching ahead."""

import mlx.core as mx
import numpy as np
import pytest

from bench.gpu.shapes import make_request
from mlxrt import Engine, EngineConfig
from mlxrt.cache.memory import paged
from mlxrt.kernels.cuda.graph import COPY, Driver, Result
from tests.support.ahead_memory import measure_peak, measure_prefill_peak
from tests.support.oracle import logits
from tests.support.toy_models import KINDS

PROMPTS = [tuple(range(5, 12)), (1, 2, 3), tuple(range(40, 63)), (9,)]


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_recomputation(kind):
    """Where they differ, the gap must be a rounding difference."""
    model = KINDS[kind]()
    with Engine(model, EngineConfig(chunk=16)) as engine:
        done = engine.generate([make_request(p, 24) for p in PROMPTS])
    check_against_recomputation(kind, model, done)


@pytest.mark.parametrize("kind", KINDS)
def test_ragged_rows_over_several_tails_equal_recomputation(kind):
    """Tails that end within blocks, as graphs where the kinds of cache allow: the second time all are captured."""
    model = KINDS[kind]()
    with Engine(model, EngineConfig(chunk=64, prefix_cache=False)) as engine:
        for _ in range(2):
            done = engine.generate([make_request(p, 90) for p in PROMPTS])
            check_against_recomputation(kind, model, done)


def check_against_recomputation(kind, model, done):
    for prompt, answer in zip(PROMPTS, done):
        rows = logits(model, (*prompt, *answer.tokens))[len(prompt) - 1 : -1]
        chosen = mx.take_along_axis(rows, mx.array(answer.tokens)[:, None], axis=1)[:, 0]
        gap = (rows.max(axis=1) - chosen).max().item()
        assert gap < 2e-2, f"{kind}: a token is {gap} below the best"


@pytest.mark.parametrize("kind", ["window", "narrow", "rotating", "rotating-keep", "q4-rotating"])
@pytest.mark.parametrize("chunk", [33, 75])
def test_a_prompt_in_tiles_of_its_window_equals_recomputation(kind, chunk, monkeypatch):
    """Toy windows are far below a tile's queries otherwise."""
    monkeypatch.setattr(paged, "MIN_TILE", 1)
    model, prompt = KINDS[kind](), tuple(i * 7 % 90 for i in range(75))
    with Engine(model, EngineConfig(chunk=chunk)) as engine:
        rows = engine.score(list(prompt))
    truth = logits(model, prompt)
    assert rows.dtype == truth.dtype == mx.float32 and mx.allclose(rows, truth, atol=1e-3)


def test_pieces_are_copied_exactly_and_all_at_once(gpu):
    """Rows of 16 bytes and of any number; a second table, longer than the first."""
    if gpu.library is None:
        pytest.skip("needs CUDA")
    driver = Driver(gpu.library)
    source, random = mx.random.randint(0, 256, (1 << 20,)).astype(mx.uint8), np.random.default_rng(0)
    to = mx.zeros(source.shape, mx.uint8)
    numbers, expected = np.array(source), np.zeros(source.shape, np.uint8)  # before: MLX moves what the host reads
    at = driver.addresses([source, to])
    for count in (3, 40):
        copies = np.zeros(count, COPY)
        for i in range(count):
            unit = 16 if i % 2 else 1
            width, height = unit * random.integers(1, 60), random.integers(1, 9)
            pitches = [width + unit * random.integers(0, 9) for _ in range(2)]
            starts = 20_000 * i + unit * random.integers(0, 50), 20_000 * (count - i) + unit * random.integers(0, 50)
            copies[i] = at[1] + starts[0], at[0] + starts[1], width, height, *pitches
            for row in range(height):
                a, b = starts[0] + row * pitches[0], starts[1] + row * pitches[1]
                expected[a : a + width] = numbers[b : b + width]
        driver.copy_pieces(copies)
    driver.wait()
    assert np.array_equal(np.array(to), expected)
    driver.close()


def test_a_graph_has_its_steps_numbers_and_keeps_its_results(gpu):
    """Each launch takes the next step's numbers; what it gives is there however many are launched before it is read."""
    if gpu.library is None:
        pytest.skip("needs CUDA")
    steps, rows, width = 9, 3, 40
    text = "y[threadIdx.x] = 2 * x[threadIdx.x];"
    double = gpu.library("double", ["x"], ["y"], text)
    x, size = mx.zeros((rows * width,), mx.uint32), rows * width
    shapes = {"output_shapes": [(size,)], "output_dtypes": [mx.uint32], "template": [("N", size)]}
    with gpu.library.recording() as launches:
        mx.eval(double(inputs=[x], grid=(size, 1, 1), threadgroup=(size, 1, 1), **shapes))
    numbers = np.arange(2000 * size, dtype=np.uint32).reshape(2000, size)
    x, y, step = mx.zeros((size,), mx.uint32), mx.zeros((size,), mx.uint32), mx.zeros((1,), mx.uint32)
    every, copied = mx.array(numbers), mx.zeros(numbers.shape, mx.uint32)
    driver = Driver(gpu.library)
    at = driver.addresses([x, y, step, every, copied])
    graph = driver.graph(
        [(launches[0], at[:2])], at[2], [(at[0], at[3], 4 * size)], [Result(at[1], (rows, width), mx.uint32)]
    )
    found = [graph.launch() for _ in range(steps)]
    assert [one.tolist() for [one] in found] == (2 * numbers[:steps]).reshape(steps, rows, width).tolist()
    driver.upload([(at[2], np.array([4], np.uint32))])
    [again] = graph.launch()
    assert again.tolist() == (2 * numbers[4]).reshape(rows, width).tolist()
    driver.copy([(at[4], at[3], numbers.nbytes)])
    driver.wait()
    assert np.array_equal(np.array(copied), numbers)
    driver.close()


def test_a_kernel_of_a_graph_waits_for_the_one_ahead_of_it(gpu):
    """Each reads what other threadgroups of the one before wrote last, so one that does not wait reads old numbers."""
    if gpu.library is None:
        pytest.skip("needs CUDA")
    n, steps = 1 << 17, 60
    text = "uint i = blockIdx.x * blockDim.x + threadIdx.x; y[i] = x[N - 1 - i] + 1;".replace("uint", "unsigned")
    reverse = gpu.library("reverse_and_add", ["x"], ["y"], text)
    one, other = mx.arange(n).astype(mx.int32), mx.zeros((n,), mx.int32)
    with gpu.library.recording() as launches:
        mx.eval(
            reverse(
                inputs=[one], grid=(n, 1, 1), threadgroup=(128, 1, 1), output_shapes=[(n,)], output_dtypes=[mx.int32],
                template=[("N", n)],
            )
        )  # fmt: skip
    driver, began = Driver(gpu.library), np.array(one)
    one, other = mx.array(began), mx.zeros((n,), mx.int32)
    at = driver.addresses([one, other])
    graph = driver.graph([(launches[0], at if i % 2 == 0 else at[::-1]) for i in range(steps)])
    for _ in range(20):
        graph.launch()
    driver.wait()
    assert np.array_equal(np.array(one), began + 20 * steps)
    driver.close()


def test_a_prompt_that_begins_early_allocates_no_second_cache():
    peak, pool = measure_prefill_peak()
    assert peak < pool / 4


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_decode_launched_ahead_allocates_no_second_cache(ahead):
    peak, pool = measure_peak(ahead)
    assert peak < pool / 4
