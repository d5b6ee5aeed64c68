"""Programs of requests on a GPU: CUDA graphs give the tokens of the same kernels launched by MLX, and `deterministic`
gives every request the tokens of a run alone.

GPU_SHAPES, GPU_KV and GPU_PROGRAMS set shapes (`/few`: with few layers), KV cache kinds and the number of programs.
"""

import mlx.core as mx
import pytest

from bench.gpu.shapes import random_model
from mlxrt import Engine, EngineConfig
from mlxrt.engine.engine import Source
from mlxrt.kernels import backend

from .conftest import from_environment
from .programs import make_program, run_program

SHAPES = from_environment(
    "GPU_SHAPES", "qwen3-0.6b@4bit,qwen3-30b-a3b@4bit/few,gemma4-e2b@4bit/few,gpt-oss-20b@mxfp4/few,qwen3.5-9b@4bit/few"
)
CAPTURED = ("qwen3-", "gemma4-e2b", "gpt-oss", "qwen3.5")  # their steps are nothing but kernels
KV = from_environment("GPU_KV", "full,q8")
PROGRAMS = range(1, 1 + int(from_environment("GPU_PROGRAMS", "6")[0]))


@pytest.fixture(scope="module", params=SHAPES)
def model(request):
    shape, few, _ = request.param.partition("/few")
    model = random_model(shape, layers="few" if few else None)
    model.shape = shape
    yield model
    del model
    mx.clear_cache()


@pytest.mark.parametrize("kv", KV)
def test_cuda_graphs_give_the_tokens_of_single_launches(model, kv):
    """Both engines hold one model and get the same requests in the same order, so every token must be equal."""
    if backend() != "cuda":
        pytest.skip("steps are launched as graphs on CUDA only")
    config = EngineConfig(max_context=1024, chunk=2048, max_running=64, kv=kv)
    with (
        Engine(model, config, source=Source("graphs")) as graphs,
        Engine(model, config, source=Source("launches")) as launches,
    ):
        if not model.shape.startswith(CAPTURED) and graphs.core.runner.graphs is None:
            pytest.skip("no kernel reads all of its caches")
        assert graphs.core.runner.graphs is not None, "steps cannot be launched as graphs here"
        launches.core.runner.graphs.max_bytes = 0  # nothing is captured: the same kernels, launched by MLX
        for seed in PROGRAMS:
            program = make_program(seed, model.config.vocab_size)
            assert run_program(graphs, program) == run_program(launches, program), f"program {seed}"
        assert graphs.core.runner.graphs.steps or not model.shape.startswith(CAPTURED), "no step was a graph"


@pytest.mark.parametrize("kv", KV)
def test_deterministic_gives_the_tokens_of_a_run_alone(model, kv):
    """Random weights in bfloat16 have logits close together, so that a sum rounded differently shows."""
    config = EngineConfig(deterministic=True, max_context=1024, max_running=64, kv=kv)
    with (
        Engine(model, config, source=Source("together")) as together,
        Engine(model, config, source=Source("alone")) as alone,
    ):
        for seed in PROGRAMS:
            program = make_program(seed, model.config.vocab_size)
            for request, tokens in zip(program, run_program(together, program), strict=True):
                [expected] = run_program(alone, [request])
                assert tokens == expected, f"program {seed}"
