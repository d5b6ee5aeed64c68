"""How many of our kernels a decode step launches."""

import mlx.core as mx

from mlxrt import Engine, EngineConfig, Request, SamplingParams
from mlxrt.engine.engine import Source


def make_request(tokens, max_tokens):
    return Request(tokens=tuple(tokens), params=SamplingParams(max_tokens=max_tokens, ignore_eos=True))


def make_zeros(**definition):
    """A `metal_kernel` whose kernels compute nothing: for whoever only counts launches."""

    def launch(*, output_shapes, output_dtypes, **_):
        return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes)]

    return launch


def launches_per_token(model, prompt) -> int:
    """Kernels of ours that one greedy token takes, as one graph where there can be one."""
    config = EngineConfig(max_context=128, chunk=64, compile=False, ahead=0, prefix_cache=False)
    gpu = model.kernels.gpu
    if gpu is None:
        return 0
    engine = Engine(model, config, source=Source("counted"))
    with engine, model.kernels.capturing(gpu.library is not None):
        counts = []
        for n in (2, 10):
            before = gpu.launches
            engine.generate(make_request(prompt[:8], n))
            counts.append(gpu.launches - before)
    return (counts[1] - counts[0]) // 8
