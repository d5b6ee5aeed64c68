"""What the engine holds and has done, as numbers at one moment."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..cache.storage import DiskStats
from .memory import buffers

if TYPE_CHECKING:
    from .engine import Engine


@dataclass(frozen=True)
class Stats:
    running: int
    waiting: int
    kv_bytes: int  # in places that somebody holds
    kv_live: int  # of them, those of running sequences
    kv_stored: int  # those of stored prefixes
    kv_shared: int  # those of both
    kv_allocated: int
    kv_limit: int
    stored_nodes: int
    hits: int
    misses: int
    reused_tokens: int
    evictions: int
    checkpoints: dict[int, int]  # tokens between two of them -> how often; empty where any length can be resumed
    preemptions: int
    positions: int  # tokens run through the model
    peak_memory: int
    disk: DiskStats | None  # None without disk_cache
    chunk: int  # most tokens in one step
    requests: int  # begun so far
    finished: dict[str, int]  # finish reason -> requests
    input_tps: float  # prompt tokens computed per second of the last ten
    output_tps: float  # tokens given out
    cached_share: float  # of all prompt tokens, those that were not computed again
    stall_bound: int  # prompt tokens that may pass between two tokens of a stream
    longest_stall: int  # that did pass
    stalls: dict[int, int]  # prompt tokens between two tokens, up to this power of two -> how often
    first_token_ms: dict[int, float]  # per cent of requests -> milliseconds from submission, at most
    inter_token_ms: dict[int, float]  # per cent of tokens -> milliseconds since the one before, at most
    memory_limit: int  # bytes the engine may take in all
    bytes: dict[str, int]  # what they are taken by: weights, kv, activations, and what MLX holds (active, cache)
    buffers: int  # arrays that the weights and pools are


def collect(engine: "Engine") -> Stats:
    return Stats(**memory(engine), **reuse(engine), **service(engine))


def memory(engine: "Engine") -> dict[str, Any]:
    groups, budget = engine.groups, engine.budget
    live, stored, shared = holders(engine)
    allocated = sum(g.nbytes(g.pool.size) for g in groups)
    return dict(
        kv_bytes=sum(g.nbytes(g.pool.used) for g in groups),
        kv_live=live,
        kv_stored=stored,
        kv_shared=shared,
        kv_allocated=allocated,
        kv_limit=sum(g.nbytes(g.pool.limit) for g in groups),
        peak_memory=mx.get_peak_memory(),
        memory_limit=budget.limit,
        bytes={
            "weights": budget.weights,
            "kv": allocated,
            "activations": budget.activations,
            "active": mx.get_active_memory(),
            "cache": mx.get_cache_memory(),
        },
        buffers=buffers(engine.model, engine.pools.arrays),
    )


def reuse(engine: "Engine") -> dict[str, Any]:
    store = engine.store
    return dict(
        stored_nodes=len(store) if store is not None else 0,
        hits=store.hits if store is not None else 0,
        misses=store.misses if store is not None else 0,
        reused_tokens=store.reused if store is not None else 0,
        evictions=store.evictions if store is not None else 0,
        checkpoints=spacing(engine),
        disk=engine.disk.stats() if engine.disk is not None else None,
    )


def service(engine: "Engine") -> dict[str, Any]:
    scheduler, metrics = engine.scheduler, engine.metrics
    in_rate, out_rate = metrics.rates()
    return dict(
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        preemptions=scheduler.preemptions,
        positions=engine.runner.positions,
        chunk=scheduler.limits.chunk,
        requests=metrics.requests,
        finished=dict(metrics.finished),
        input_tps=in_rate,
        output_tps=out_rate,
        cached_share=metrics.cached_share,
        stall_bound=scheduler.bound,
        longest_stall=scheduler.longest_stall,
        stalls=dict(sorted(scheduler.stalls.items())),
        first_token_ms=metrics.first_token_ms(),
        inter_token_ms=metrics.inter_token_ms(),
    )


def holders(engine: "Engine") -> tuple[int, int, int]:
    """Bytes held by running sequences, by the store, and by both."""
    total = [0, 0, 0]
    for i, g in enumerate(engine.groups):
        running = [seq.parts[i] for seq in engine.scheduler.running if seq.parts]
        live = {b.id for part in running for b in part.blocks}
        stored = engine.store.block_ids(i) if engine.store is not None else set()
        for k, places in enumerate((live, stored, live & stored)):
            total[k] += g.nbytes(len(places))
    return total[0], total[1], total[2]


def spacing(engine: "Engine") -> dict[int, int]:
    sparse = [i for i, part in enumerate(engine.empty()) if part.sparse]
    return engine.store.checkpoint_spacing(sparse[0]) if engine.store is not None and sparse else {}
