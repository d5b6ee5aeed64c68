"""Peak memory of decode launched ahead over large KV pools: a second copy of the cache would show in it."""

import mlx.core as mx

from mlxrt import Engine, EngineConfig, Request, SamplingParams

from .toy_models import make


def make_request(tokens, max_tokens):
    return Request(tokens=tuple(tokens), params=SamplingParams(max_tokens=max_tokens, ignore_eos=True))


def measure_peak(ahead: int) -> tuple[int, int]:
    """(peak bytes above what is held before, bytes of the KV pools)."""
    with Engine(make("f", size=32), EngineConfig(ahead=ahead)) as engine:
        held = [g.pool.allocate(8192) for g in engine.core.pools.groups]
        list(engine.stream(make_request(range(8), 2)))
        del held
        pool = sum(p.nbytes for p in engine.core.runner.pools.arrays[0])
        stream = engine.stream(make_request(range(20), 140))
        for _ in range(8):
            next(stream)
        mx.synchronize()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        list(stream)
        return mx.get_peak_memory() - before, pool
