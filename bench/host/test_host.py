"""The hot host paths by the clock: `python -m pytest bench/host`, with pytest-benchmark's own options."""

import random

import pytest

from mlxrt.cache.blocks import BlockPool
from mlxrt.cache.layer_state import BlockTable, RecurrentState
from mlxrt.cache.prefix_cache import PrefixCache
from mlxrt.engine.kv_allocator import KVAllocator
from mlxrt.engine.request import Request, SamplingParams
from mlxrt.engine.scheduler import Limits, Scheduler

from .work import BLOCK, WORK

SEQUENCES, STEPS = 256, 100
POOLS = [BlockPool(1 << 16) for _ in range(3)]
STATES = {
    "full": (BlockTable(POOLS[0], BLOCK),),
    "window and full": (BlockTable(POOLS[0], BLOCK), BlockTable(POOLS[1], BLOCK, 512, 48)),
    "recurrent and full": (BlockTable(POOLS[0], BLOCK), RecurrentState(POOLS[2], BLOCK)),
}


@pytest.mark.parametrize("name", WORK)
def test_host_path(benchmark, name):
    benchmark(WORK[name]())


@pytest.mark.parametrize("arriving", [False, True], ids=["stable batch", "requests come and go"])
@pytest.mark.parametrize("name", STATES)
def test_scheduler_overhead(benchmark, name, arriving):
    empty = lambda: STATES[name]  # noqa: E731
    scheduler = Scheduler(KVAllocator(empty, PrefixCache(empty, BLOCK)), Limits(SEQUENCES, chunk=2048, length=1 << 20))
    generator = random.Random(0)

    def submit(max_tokens):
        prompt = tuple(generator.randrange(50_000) for _ in range(generator.randrange(100, 300)))
        scheduler.add(Request(tokens=prompt, params=SamplingParams(max_tokens=max_tokens)), prompt)

    def step():
        planned = scheduler.plan().step
        for s in planned.slices:
            if s.samples:
                s.seq.pending.append((None, 0))
                scheduler.commit(s, 7)

    def refill():
        while arriving and len(scheduler.waiting) < 8:
            submit(200)

    for _ in range(SEQUENCES):
        submit(generator.randrange(40, 200) if arriving else 1 << 20)
    while len(scheduler.decoding) < SEQUENCES * 0.9 or (scheduler.prefilling and not arriving):
        step()
        refill()
    before = sum(len(s.tokens) for s in scheduler.running)
    benchmark.pedantic(step, setup=refill, rounds=STEPS)
    benchmark.extra_info["sequences"] = len(scheduler.running)  # the figure that counts is a step's time over these
    assert arriving or sum(len(s.tokens) for s in scheduler.running) > before
