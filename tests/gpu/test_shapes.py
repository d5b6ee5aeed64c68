"""Every published shape on this device, at its full width with as few layers as show each kind: kernels="strict".

Nothing may run as plain MLX, and logits are as near to those of float32 as plain MLX's in bfloat16 are: random weights
make some models chaotic, and rounding alone gives them other logits. GPU_STRICT_SHAPES sets which.
"""

import gc
import os
import time

import mlx.core as mx
import pytest

from bench.gpu.shapes import make_prompts, make_request, random_model
from mlxrt import Engine, EngineConfig, WontFit
from mlxrt.engine.engine import Source
from mlxrt.errors import is_out_of_memory
from mlxrt.kernels import backend
from mlxrt.weights.random_models import published_configs

from .conftest import from_environment, parse_part

MXFP4 = ("gpt-oss-20b", "gpt-oss-120b")  # published in it
SHAPES = from_environment(
    "GPU_STRICT_SHAPES", ",".join(f"{n}@{'mxfp4' if n in MXFP4 else '4bit'}" for n in published_configs())
)
PROMPT, TOKENS, ROWS = 150, 40, 24
# Root mean square of a row, relative to that of its logits; or so many times plain MLX's.
MAX_ERROR, MAX_RATIO = 0.05, 1.3
MAX_WAIT = 200  # seconds for memory that other processes hold


def run(shape, kernels, exact=False):
    """Logits of a prompt in chunks, and greedy tokens of one request and of three."""
    model = random_model(shape, layers="few", kernels=kernels, exact=exact)
    prompts = make_prompts(model.config.vocab_size, 3, PROMPT)
    config = EngineConfig(max_context=512, chunk=64, prefix_cache=False, kv_memory="1G", kernels=kernels)
    with Engine(model, config, source=Source(shape)) as engine:
        alone = engine.generate(make_request(prompts[0], TOKENS)).tokens
        together = [a.tokens for a in engine.generate([make_request(p, TOKENS) for p in prompts])]
        rows = [engine.score(prompts[0], chunk=chunk)[-ROWS:] for chunk in (64, 1)]  # prefill steps, decode steps
        used = dict(model.kernels.used)
    mx.clear_cache()
    return mx.concatenate(rows), alone, together, used


def run_when_it_fits(*args, **options):
    """`run`, again while other parts of the tests fill the device; where there is one part it must fit at once."""
    _, parts = parse_part(os.environ.get("PART", "1/1"))
    end = time.monotonic() + (MAX_WAIT if parts > 1 else 0)
    while True:
        try:
            return run(*args, **options)
        except (RuntimeError, WontFit) as error:
            full = isinstance(error, WontFit) or is_out_of_memory(error)
            if not full or time.monotonic() > end:
                raise
        gc.collect()
        mx.clear_cache()
        time.sleep(2)


def find_error(rows, right):
    """The median over rows: rounding sends some tokens to other experts."""
    errors = mx.sqrt(mx.square(rows - right).mean(axis=-1) / mx.square(right).mean(axis=-1))
    return mx.sort(errors)[ROWS].item()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_published_shape_is_nothing_but_kernels(shape, report):
    if backend() == "cpu":
        pytest.skip("needs a GPU's kernels")
    rows, alone, together, used = run_when_it_fits(shape, "strict")
    plain, *_ = run_when_it_fits(shape, "reference")
    right, *_ = run_when_it_fits(shape, "reference", exact=True)
    error, allowed = find_error(rows, right), find_error(plain, right)
    what = (
        f"{sum(used.values())} calls of {len(used)} kernels, logits {error:.1e} off float32 (plain MLX {allowed:.1e})"
    )
    report(f"strict {shape}: {what}")
    assert error < max(MAX_ERROR, MAX_RATIO * allowed)
    assert len(alone) == TOKENS and all(len(t) == TOKENS for t in together)
