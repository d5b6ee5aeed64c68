"""Every published shape on this device, at its full width with as few layers as show each kind: kernels="strict".

Nothing may run as plain MLX, and logits are those of plain MLX to bfloat16's rounding. GPU_STRICT_SHAPES sets which.
Shapes with a known gap are compared with what kernels they have, and the report names the gap.
"""

import mlx.core as mx
import pytest

from bench.gpu.shapes import make_prompts, make_request, random_model
from mlxrt import Engine, EngineConfig
from mlxrt.engine.engine import Source
from mlxrt.errors import NoKernel
from mlxrt.kernels import backend
from mlxrt.weights.random_models import published_configs

from .conftest import from_environment

MXFP4 = ("gpt-oss-20b", "gpt-oss-120b")  # published in it
SHAPES = from_environment(
    "GPU_STRICT_SHAPES", ",".join(f"{n}@{'mxfp4' if n in MXFP4 else '4bit'}" for n in published_configs())
)
# Rows of 576, 2,880 and 2,112 elements: the matrix-matrix kernel takes multiples of 128.
KNOWN_GAPS = ("smollm2-135m", "gpt-oss-20b", "gpt-oss-120b", "gemma4-26b-a4b")
PROMPT, TOKENS, ROWS = 150, 40, 24
MAX_ERROR = 0.05  # root mean square of a row, relative to that of its logits


def run(shape, kernels):
    """Logits of a prompt in chunks, and greedy tokens of one request and of three."""
    model = random_model(shape, layers="few", kernels=kernels)
    prompts = make_prompts(model.config.vocab_size, 3, PROMPT)
    config = EngineConfig(max_context=512, chunk=64, prefix_cache=False, kv_memory="1G", kernels=kernels)
    with Engine(model, config, source=Source(shape)) as engine:
        alone = engine.generate(make_request(prompts[0], TOKENS)).tokens
        together = [a.tokens for a in engine.generate([make_request(p, TOKENS) for p in prompts])]
        rows = [engine.score(prompts[0], chunk=chunk)[-ROWS:] for chunk in (64, 1)]  # prefill steps, decode steps
        used = dict(model.kernels.used)
    mx.clear_cache()
    return mx.concatenate(rows), alone, together, used


@pytest.mark.parametrize("shape", SHAPES)
def test_a_published_shape_is_nothing_but_kernels(shape, report):
    if backend() == "cpu":
        pytest.skip("needs a GPU's kernels")
    gap = ""
    try:
        rows, alone, together, used = run(shape, "strict")
    except NoKernel as missing:
        if not shape.startswith(KNOWN_GAPS):
            raise
        gap = f", but {missing}"
        rows, alone, together, used = run(shape, "auto")
    expected, *_ = run(shape, "reference")
    errors = mx.sqrt(mx.square(rows - expected).mean(axis=-1) / mx.square(expected).mean(axis=-1))
    error = mx.sort(errors)[ROWS].item()  # the median: rounding sends some tokens to other experts
    report(f"strict {shape}: {sum(used.values())} calls of {len(used)} kernels, logits {error:.1e} off plain MLX{gap}")
    assert error < MAX_ERROR
    assert len(alone) == TOKENS and all(len(t) == TOKENS for t in together)
