"""Streams nobody closes: their requests end with them, whether or not the garbage collector runs.

`python -m tests.long.drop_streams` drops 200 of each kind.
"""

import asyncio
import gc
import threading
import weakref

import pytest

import mlxrt
from mlxrt import AsyncEngine, Engine, EngineConfig, Request, SamplingParams
from tests.long.drop_streams import ASYNC, KINDS, check, prompt, wait_until_idle
from tests.support.state_machine.kinds import model


@pytest.fixture
def no_gc():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left_of_what_is_dropped(kind):
    assert check(kind, 8 if kind in ASYNC else 4, seed=7, collect=False) == []


def test_the_queue_is_free_after_it_was_full_of_dropped_streams(no_gc):
    """As a program that breaks out of its streams meets it: `async for event in engine.stream(...): break`."""

    async def work():
        async with AsyncEngine(Engine(model("full"), EngineConfig(max_queue=3, max_running=1))) as engine:
            for k in range(20):
                async for _ in engine.stream(prompt(k), max_tokens=300):
                    break
            await asyncio.to_thread(wait_until_idle, engine.engine)
            return (await engine.stats()), await engine.generate(prompt(1), max_tokens=2)

    stats, done = asyncio.run(work())
    assert stats.running == stats.waiting == 0 and stats.finished["cancelled"] == 20 and len(done.tokens) == 2


def test_a_stream_that_could_not_open_is_deleted(no_gc):
    async def work():
        async with AsyncEngine(Engine(model("full"), EngineConfig(max_queue=1))) as engine:
            stream = engine.stream((10**6,))
            with pytest.raises(mlxrt.BadRequest):
                await anext(stream)
            return weakref.ref(stream)

    assert asyncio.run(work())() is None


def test_a_reader_is_woken_when_another_closes_its_stream():
    async def work():
        async with AsyncEngine(Engine(model("full")), buffer=1) as engine:
            stream = engine.stream(prompt(1), max_tokens=400)
            await anext(stream)
            engine.engine.core.pause((await stream.wait_submitted())[0])
            reader = asyncio.ensure_future(collect(stream))
            await asyncio.sleep(0.05)
            await stream.aclose()
            await asyncio.wait_for(reader, 20)

    async def collect(stream):
        return [event async for event in stream]

    asyncio.run(work())


def test_a_wait_that_times_out_leaves_the_stream_as_it_was():
    """Before the request was submitted too: the thread is kept busy until the wait is over."""
    release = threading.Event()

    async def work():
        async with AsyncEngine(Engine(model("full"))) as engine:
            engine.thread.post(release.wait)
            stream = engine.stream(prompt(1), max_tokens=5)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(stream), 0.01)
            release.set()
            return len([event async for event in stream])

    assert asyncio.run(work()) == 5


def test_a_stream_of_another_event_loop_is_refused():
    engine = AsyncEngine(Engine(model("full")))

    async def make():
        return engine.stream(prompt(1), max_tokens=50)

    async def read(stream):
        await anext(stream)

    stream = asyncio.run(make())
    with pytest.raises(mlxrt.BadRequest, match="event loop"):
        asyncio.run(read(stream))
    asyncio.run(engine.close())


def test_a_dropped_engine_takes_its_thread_along(no_gc):
    inner = Engine(model("full"))
    outer = AsyncEngine(inner)
    thread = outer.thread
    stream = asyncio.run(open_stream(outer))
    del outer
    assert thread.alive  # the stream may still be read
    del stream
    thread.join()
    assert len(inner.generate(prompt(1), max_tokens=2).tokens) == 2  # it may have other users


async def open_stream(engine):
    return engine.stream(prompt(2), max_tokens=50)


def test_an_error_somebody_keeps_holds_no_stream(no_gc):
    """The thread of one stream steps for all: the frames of an error raised in a step would hold that stream."""
    engine = Engine(model("full"))
    mine = engine.stream(prompt(1), max_tokens=100)

    def fail(row):
        raise KeyError("mine")

    params = SamplingParams(max_tokens=5)
    failing = engine.submit(Request(tokens=prompt(2), params=params, on_logits=fail))
    while not (events := engine.take(failing)):
        next(mine)
    dropped = weakref.ref(mine)
    del mine
    assert isinstance(events[-1].error, KeyError) and "in fail" in "".join(events[-1].error.__notes__)
    assert dropped() is None and engine.stats().running == 0
