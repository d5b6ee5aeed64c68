"""Peak memory of steps that write large KV pools while others run: a second copy of the cache would show in it."""

import mlx.core as mx

from mlxrt import Engine, EngineConfig, Request, SamplingParams

from .toy_models import make


def make_request(tokens, max_tokens):
    return Request(tokens=tuple(tokens), params=SamplingParams(max_tokens=max_tokens, ignore_eos=True))


def grow_pools(engine: Engine) -> int:
    """To 8,192 blocks, all of them free again; bytes of one layer's."""
    held = [g.pool.allocate(8192) for g in engine.core.pools.groups]
    list(engine.stream(make_request(range(8), 2)))
    del held
    return sum(p.nbytes for p in engine.core.runner.pools.arrays[0])


def measure_prefill_peak() -> tuple[int, int]:
    """The same of a prompt whose first layers are computed while the last are built."""
    with Engine(make("ffffff", size=32)) as engine:
        pool = grow_pools(engine)
        engine.generate([make_request(range(30, 50), 2)])
        mx.synchronize()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        engine.generate([make_request(range(60, 90), 1)])
        return mx.get_peak_memory() - before, pool


def measure_peak(ahead: int) -> tuple[int, int]:
    """(peak bytes above what is held before, bytes of the KV pools)."""
    with Engine(make("f", size=32), EngineConfig(ahead=ahead)) as engine:
        pool = grow_pools(engine)
        stream = engine.stream(make_request(range(20), 140))
        for _ in range(8):
            next(stream)
        mx.synchronize()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        list(stream)
        return mx.get_peak_memory() - before, pool
