"""Streams, replies and sessions that are dropped without being closed, beside requests that go on: nothing is left.

    python -m tests.long.drop_streams [--count 200] [--kind sync] [--seed 1] [--processes 4]

Each kind runs with the garbage collector and without it: nothing here may need it. Afterwards no request runs or
waits, every block is free, the memory is what it was, no object of a request is alive, and the requests beside them
gave the tokens they give alone. Exit code 1 where anything is left or differs.
"""

import argparse
import asyncio
import gc
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import cache

from mlxrt import AsyncEngine, Engine, EngineConfig, Request, SamplingParams
from mlxrt.engine.async_stream import AsyncReply, AsyncStream, EventBuffer
from mlxrt.engine.output import RequestState, RequestStream
from mlxrt.engine.sequence import Sequence
from mlxrt.engine.session import Reply
from tests.support import oracle
from tests.support.parallel import run_parts
from tests.support.state_machine.kinds import model as toy_model
from tests.support.state_machine.kinds import tokenizer

import mlx.core as mx  # isort: skip  after mlxrt, which loads a BLAS

OBJECTS = (AsyncReply, AsyncStream, EventBuffer, Reply, RequestState, RequestStream, Sequence)
CONFIG = EngineConfig(max_running=6, max_queue=40, chunk=8, kv_memory="4M")
ANSWER = 16
SMALL = 1 << 15  # bytes: index arrays that the engine keeps for the next step


def prompt(k: int, n: int = 12) -> tuple[int, ...]:
    return tuple((k * 31 + j * 7) % 251 for j in range(n))


def request(rng: random.Random, **options) -> Request:
    deadline = rng.choice([None, 1e6])
    params = SamplingParams(max_tokens=400)
    return Request(tokens=prompt(rng.randrange(200), rng.randint(1, 40)), params=params, deadline_s=deadline, **options)


@cache
def truth(k: int) -> tuple[int, ...]:
    return oracle.truth(toy_model("gemma"), prompt(k), ANSWER)


# How streams of an Engine are dropped


def drop_stream(engine: Engine, rng: random.Random) -> None:
    stream = engine.stream(request(rng))
    for _ in range(rng.randrange(4)):
        next(stream)


def drop_batch(engine: Engine, rng: random.Random) -> None:
    stream = engine.stream([request(rng) for _ in range(rng.randint(1, 5))])
    for _ in range(rng.randrange(6)):
        next(stream)


def drop_reply(engine: Engine, rng: random.Random) -> None:
    session = engine.session("s", max_tokens=300)
    if rng.random() < 0.3:
        session.say("first", max_tokens=2).text  # noqa: B018
    for reply in [session.say(f"why {rng.random()}?"), session.fork().say("no")][: rng.randint(1, 2)]:
        for _ in range(rng.randrange(3)):
            next(reply)


def drop_raising(engine: Engine, rng: random.Random) -> None:
    """A reader that raises, and a callback that does."""
    with suppress(ZeroDivisionError):
        for _ in engine.stream(request(rng)):
            1 / 0  # noqa: B018
    with suppress(ZeroDivisionError):
        engine.generate([request(rng, on_logits=lambda row: 1 / 0)])


# How streams of an AsyncEngine are dropped


async def drop_async_stream(engine: AsyncEngine, rng: random.Random) -> None:
    stream, n = engine.stream(request(rng)), rng.randrange(4)
    if n:
        async for _ in stream:
            if not (n := n - 1):
                break


async def drop_async_batch(engine: AsyncEngine, rng: random.Random) -> None:
    stream, n = engine.stream([request(rng) for _ in range(rng.randint(1, 5))]), rng.randrange(6)
    for _ in range(n):
        await anext(stream)


async def drop_async_reply(engine: AsyncEngine, rng: random.Random) -> None:
    session = engine.session("s", max_tokens=300)
    if rng.random() < 0.3:
        await (await session.say("first", max_tokens=2)).text()
    reply = await session.say(f"why {rng.random()}?")
    for _ in range(rng.randrange(3)):
        await anext(reply)


async def drop_cancelled(engine: AsyncEngine, rng: random.Random) -> None:
    """A task that is cancelled wherever it happens to wait."""

    async def read() -> None:
        async with engine.stream(request(rng)) as stream:
            async for _ in stream:
                continue

    async def leave() -> None:
        stream = engine.stream(request(rng))
        await anext(stream)
        await stream.aclose()

    async def converse() -> None:
        await (await engine.session(max_tokens=300).say("why?")).text()

    work = rng.choice([lambda: engine.generate(request(rng)), read, leave, converse])
    task = asyncio.ensure_future(work())
    for _ in range(rng.choice([0, 0, 1, 2, 3, 5, 9])):
        await asyncio.sleep(0)
    if rng.random() < 0.5:
        await asyncio.sleep(rng.random() * 0.02)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def drop_unstarted(engine: AsyncEngine, rng: random.Random) -> None:
    """Streams nobody reads, before and after they have opened, and coroutines nobody awaits."""
    engine.stream(request(rng))
    stream = engine.stream(request(rng))
    if rng.random() < 0.5:
        await stream.wait_submitted()
    engine.generate(request(rng)).close()
    with suppress(TimeoutError):
        await asyncio.wait_for(anext(stream), 1e-4)


SYNC: dict[str, Callable[[Engine, random.Random], None]] = {
    "sync": drop_stream, "sync batch": drop_batch, "sync replies": drop_reply, "sync raising": drop_raising,
}  # fmt: skip
ASYNC: dict[str, Callable[[AsyncEngine, random.Random], Awaitable[None]]] = {
    "async": drop_async_stream, "async batch": drop_async_batch, "async replies": drop_async_reply,
    "async cancelled": drop_cancelled, "async unstarted": drop_unstarted,
}  # fmt: skip
LOOPS = "async closed loops"
KINDS = (*SYNC, *ASYNC, LOOPS)


def run_sync(engine: Engine, kind: str, count: int, rng: random.Random) -> list[tuple[int, tuple[int, ...]]]:
    """Drop `count` streams beside others that are read to their end: (prompt, tokens) of those."""
    read, beside = [], [(k, engine.stream(prompt(k), max_tokens=ANSWER)) for k in range(3)]
    got: dict[int, list[int]] = {k: [] for k, _ in beside}
    for i in range(count):
        SYNC[kind](engine, rng)
        k, stream = beside[i % len(beside)]
        if (event := next(stream, None)) is not None and event.token is not None:
            got[k].append(event.token)
    for k, stream in beside:
        got[k] += [event.token for event in stream if event.token is not None]
        read.append((k, tuple(got[k])))
    return read


async def run_async(engine: AsyncEngine, kind: str, count: int, rng: random.Random):
    async def load(k: int) -> tuple[int, tuple[int, ...]]:
        return k, (await engine.generate(prompt(k), max_tokens=ANSWER)).tokens

    beside = [asyncio.ensure_future(load(k)) for k in range(3)]
    for i in range(count):
        await ASYNC[kind](engine, rng)
        if i % 10 == 9:
            beside.append(asyncio.ensure_future(load(i % 7)))
            await asyncio.sleep(0.01)
    return await asyncio.gather(*beside)


def run_loops(engine: AsyncEngine, count: int, rng: random.Random):
    """Event loops that are closed while streams are open: paused ones too, and streams that are still held."""
    held = []

    async def leave() -> None:
        held.extend(engine.stream(request(rng)) for _ in range(4))
        for stream in held[-4:]:
            await anext(stream)
        await asyncio.sleep(0.01)

    async def load() -> list[tuple[int, tuple[int, ...]]]:
        return [(k, (await engine.generate(prompt(k), max_tokens=5)).tokens) for k in range(2)]

    done = []
    for _ in range(count // 4):
        asyncio.run(leave())
        done += asyncio.run(load())
    wait_until_idle(engine.engine)
    return done


def wait_until_idle(engine: Engine, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while (engine.core.busy or engine.core.outputs.states) and time.monotonic() < deadline:
        time.sleep(0.01)


def count_objects() -> Counter:
    return Counter(kind.__name__ for kind in map(type, gc.get_objects()) if kind in OBJECTS)


def find_leftovers(engine: Engine, before: Counter, memory: int) -> list[str]:
    core, found = engine.core, []
    stats = engine.stats()
    if stats.running or stats.waiting or core.outputs.states:
        found.append(f"{stats.running} requests run, {stats.waiting} wait, {len(core.outputs.states)} have states")
    core.prefix_cache.clear()
    if used := sum(group.pool.used for group in core.pools.groups):
        found.append(f"{used} blocks are in use")
    if left := count_objects() - before:
        found.append(f"objects that are alive: {dict(left)}")
    core.runner.flush()
    mx.synchronize()
    mx.clear_cache()
    if (now := mx.get_active_memory() - stats.kv_allocated) > memory + SMALL:
        found.append(f"{now - memory} bytes of device memory")
    return found


def check(kind: str, count: int, seed: int, collect: bool) -> list[str]:
    """What is left after `count` drops, and what differs."""
    rng = random.Random(f"{kind} {seed}")
    engine = Engine(toy_model("gemma"), CONFIG, tokenizer())
    engine.generate(prompt(1), max_tokens=ANSWER)
    for _, _ in zip(engine.stream([request(random.Random(k)) for k in range(6)]), range(60)):
        continue
    engine.core.prefix_cache.clear()
    gc.collect()
    gc.enable() if collect else gc.disable()
    mx.synchronize()
    mx.clear_cache()
    before, memory = count_objects(), mx.get_active_memory() - engine.stats().kv_allocated
    try:
        if kind in SYNC:
            done = run_sync(engine, kind, count, rng)
            while engine.step():  # what was launched ahead of the last drop
                continue
        else:
            done = run_with_thread(engine, kind, count, rng)
        if collect:
            gc.collect()
        wait_until_idle(engine)
        found = find_leftovers(engine, before, memory)
    finally:
        gc.enable()
    found += [f"prompt {k} gave other tokens" for k, got in done if not got or got != truth(k)[: len(got)]]
    answer = engine.generate(prompt(9), max_tokens=4).tokens
    engine.close()
    return found + ["the engine does not answer right"] * (answer != truth(9)[:4])


def run_with_thread(engine: Engine, kind: str, count: int, rng: random.Random):
    """Through an AsyncEngine, which is dropped too: its thread ends and leaves the engine open."""
    outer = AsyncEngine(engine, buffer=4)
    done = run_loops(outer, count, rng) if kind == LOOPS else asyncio.run(run_async(outer, kind, count, rng))
    wait_until_idle(engine)
    thread = outer.thread
    del outer
    thread.join()
    return done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    kinds = [options.kind] if options.kind else KINDS
    parts = [(kind, options.count, options.seed, collect) for kind in kinds for collect in (True, False)]
    failed = 0
    for line, found in run_parts(describe, parts, options.processes):
        print(line, flush=True)
        failed += bool(found)
    return 1 if failed else 0


def describe(kind: str, count: int, seed: int, collect: bool) -> tuple[str, list[str]]:
    """A line about one kind, and what was found."""
    began = time.perf_counter()
    found = check(kind, count, seed, collect)
    line = f"{kind}, {count} dropped {'with' if collect else 'without'} gc: {'; '.join(found) or 'nothing left'}"
    return f"{line} ({time.perf_counter() - began:.1f} s)", found


if __name__ == "__main__":
    sys.exit(main())
