"""Logits after a long prompt with a quantized KV cache, within what docs/decisions/0013 allows.

In float32, where rounding hides nothing: kernels against plain MLX on the same quantized values, and each kind against
full precision. Every row's next tokens are given, so that all paths see the same ones; steps after the first are decode
steps. Rows of a batch differ in length and in their last 40 tokens and share the rest, since plain MLX prefills slowly
in float32. GPU_SHAPE, GPU_LAYERS and GPU_TOKENS set shape, layers and prompt length.
"""

import mlx.core as mx
import pytest

from bench.gpu.shapes import random_model
from mlxrt import Engine, EngineConfig, Request, SamplingParams
from mlxrt.engine.engine import Source

from .conftest import from_environment

[SHAPE] = from_environment("GPU_SHAPE", "qwen3-8b@4bit")
LAYERS = int(from_environment("GPU_LAYERS", "4")[0])
TOKENS = int(from_environment("GPU_TOKENS", "8192")[0])
STEPS = 4
MAX_KERNEL_ERROR = 5e-5  # kernels against plain MLX, any kind: root mean square, relative to the logits'
MAX_ERROR = {"full": 0.0, "q8": 0.015, "k8v4": 0.2, "q4": 0.25}  # a kind against full, by the square root of layers


def make_prompts(vocab, batch):
    """The longest first; each has the beginning of the stem and an end of its own."""
    stem = [(j * 7 + (j * j) % 11) % (vocab - 10) for j in range(TOKENS)]
    return [stem[: TOKENS - 40 - 517 * i] + [(i * 131 + j * 3) % 1000 for j in range(40)] for i in range(batch)]


def compute_logits(model, mode, kind, prompts):
    """[rows, STEPS, V]: after the prompt, then after every given token; and the kernels that ran."""
    context = TOKENS + 4 * STEPS
    memory = len(prompts) * (context + 2048) * LAYERS * 16384
    config = EngineConfig(
        kv=kind, max_context=context, chunk=2048, max_running=len(prompts), kv_memory=memory, kernels=mode
    )
    seen, before = [[] for _ in prompts], dict(model.kernels.used)

    def give_tokens(i):
        def on_logits(row):
            seen[i].append(mx.array(row.logits))
            mx.eval(seen[i][-1])
            row.allow([(17 * i + 5 * len(seen[i])) % 1000])

        return on_logits

    params = SamplingParams(max_tokens=STEPS, ignore_eos=True)
    requests = [Request(tokens=tuple(p), params=params, on_logits=give_tokens(i)) for i, p in enumerate(prompts)]
    with Engine(model, config, source=Source(kind)) as engine:
        engine.generate(Request(tokens=tuple(prompts[0]), params=SamplingParams(max_tokens=1)))  # the shared prefix
        engine.generate(requests)
        used = {name for name, calls in model.kernels.used.items() if calls > before.get(name, 0)}
    return mx.stack([mx.stack(rows) for rows in seen]), used


def distance(a, b):
    """Root mean square of the worst row, relative to that row's own."""
    error = mx.sqrt(mx.square(a - b).mean(axis=-1)) / mx.sqrt(mx.square(b).mean(axis=-1))
    return error.max().item()


@pytest.mark.parametrize(("batch", "kinds"), [(1, ("full", "q8", "k8v4", "q4")), (8, ("full", "q8", "q4"))])
def test_quantized_kv_logits(batch, kinds):
    found = {}
    for mode in ("auto", "reference"):
        model = random_model(SHAPE, mx.float32, LAYERS, kernels=mode)
        prompts = make_prompts(model.config.vocab_size, batch)
        for kind in kinds:
            found[mode, kind], used = compute_logits(model, mode, kind, prompts)
            if mode == "auto":
                assert any("atten" in name for name in used), f"{kind}: attention ran as plain MLX"
        del model
        mx.clear_cache()
    for kind in kinds:
        kernel_error = distance(found["auto", kind], found["reference", kind])
        error, allowed = distance(found["auto", kind], found["auto", "full"]), MAX_ERROR[kind] * LAYERS**0.5
        print(f"{kind}, {batch} x {TOKENS}: kernels {kernel_error:.1e} off plain MLX, {error:.1e} off full precision")
        assert kernel_error <= MAX_KERNEL_ERROR, kind
        assert error <= allowed, kind
