"""AsyncEngine: the engine's tokens, back-pressure, both ways to close, and a death that everybody hears of."""

import asyncio
import threading

import pytest

import mlxrt
from mlxrt import AsyncEngine, AsyncSession, Engine, EngineConfig, Request, SamplingParams
from mlxrt.engine.async_stream import EventBuffer, LoopReaders
from tests.support.oracle import truth, truths
from tests.support.state_machine.kinds import model as spoken
from tests.support.state_machine.kinds import tokenizer
from tests.support.toy_models import VOCAB, make


@pytest.fixture(scope="module")
def model():
    return make("wf")


def prompt(k: int, n: int = 12) -> tuple[int, ...]:
    return tuple((k * 31 + j * 7) % VOCAB for j in range(n))


def run(work):
    """A coroutine to its end; nothing here may take a minute."""
    return asyncio.run(asyncio.wait_for(work, 120))


def test_generate_and_stream_give_the_tokens(model):
    async def work():
        async with AsyncEngine(Engine(model, EngineConfig(chunk=8))) as engine:

            async def read(k):
                return tuple([e.token async for e in engine.stream(prompt(k), max_tokens=8 + k)])

            some = [Request(tokens=prompt(k), params=SamplingParams(max_tokens=6)) for k in (20, 21)]
            streamed = asyncio.gather(*(read(k) for k in range(6)))
            one, many = await engine.generate(prompt(9), max_tokens=11), await engine.generate(some)
            rows = await engine.score(prompt(3))
            return await streamed, one, many, rows, await engine.stats()

    streamed, one, many, rows, stats = run(work())
    assert streamed == [truth(model, prompt(k), 8 + k) for k in range(6)]
    assert one.tokens == truth(model, prompt(9), 11) and one.finish_reason == "length"
    assert [m.tokens for m in many] == [truth(model, prompt(k), 6) for k in (20, 21)]
    assert rows.shape == (12, VOCAB) and stats.finished == {"length": 9}


def test_a_prompt_that_takes_long_to_encode_holds_up_no_stream(model):
    """It is encoded, and its grammar compiled, beside the thread that steps."""
    gate, in_time = threading.Event(), []

    async def work():
        async with AsyncEngine(Engine(model)) as engine:
            encode = engine.engine.encode

            def encode_slowly(request):
                if request.tokens == prompt(1, 5):
                    in_time.append(gate.wait(60))
                return encode(request)

            engine.engine.encode = encode_slowly
            running = engine.stream(prompt(2), max_tokens=60)
            first = await anext(running)
            slow = engine.stream(prompt(1, 5), max_tokens=4)
            tokens = (first.token, *[e.token async for e in running])
            gate.set()
            return tokens, tuple([e.token async for e in slow])

    assert run(work()) == (truth(model, prompt(2), 60), truth(model, prompt(1, 5), 4))
    assert in_time == [True]


def test_streams_opened_as_the_engine_closes_get_the_error(model):
    async def work():
        engine = AsyncEngine(Engine(model))
        gate, encode = threading.Event(), engine.engine.encode
        engine.engine.encode = lambda request: gate.wait(60) and encode(request)
        waiting = engine.stream(prompt(1), max_tokens=4)
        await engine.close()
        late = engine.stream(prompt(2), max_tokens=4)
        gate.set()
        for stream in (waiting, late):
            with pytest.raises(mlxrt.EngineClosed):
                await anext(stream)

    run(work())


def test_reads_that_time_out_lose_no_event(model):
    """As a server that sends a sign of life whenever nothing came for a while."""

    async def work():
        async with AsyncEngine(Engine(model)) as engine:
            stream, tokens, late = engine.stream(prompt(1), max_tokens=80), [], 0
            while True:
                try:
                    tokens.append((await asyncio.wait_for(anext(stream), (late % 5) * 1e-4)).token)
                except TimeoutError:
                    late += 1
                except StopAsyncIteration:
                    return tuple(tokens), late

    tokens, late = run(work())
    assert tokens == truth(model, prompt(1), 80) and late > 0


def test_an_event_loop_is_woken_once_for_all_streams_of_a_step(model):
    async def work():
        loop, woken = asyncio.get_running_loop(), []
        call = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *args, **options: (woken.append(args), call(*args, **options))[1]
        engine = Engine(model)
        readers, buffers = LoopReaders(loop), []
        for k in range(8):
            buffers.append(EventBuffer(engine, loop, lambda: 64, lambda job: None))
            asked = [Request(tokens=prompt(k), params=SamplingParams(max_tokens=9))] * 2
            buffers[k].open(readers, asked, [tuple(prompt(k))] * 2)
        while not all(len(buffer.events) > 3 for buffer in buffers):
            engine.step()  # on this thread: the loop cannot run meanwhile
        assert len(woken) == 1 and not any(buffer.arrival.is_set() for buffer in buffers)
        await asyncio.sleep(0)
        assert all(buffer.arrival.is_set() for buffer in buffers)
        while engine.step():
            continue
        assert len(woken) == 2 and [len(buffer.events) for buffer in buffers] == [18] * 8

    run(work())


def test_a_slow_reader_stops_its_own_request_only(model):
    async def work():
        async with AsyncEngine(Engine(model), buffer=4) as engine:
            slow = engine.stream(prompt(1), max_tokens=60)
            await slow.wait_submitted()
            quick = await engine.generate(prompt(2), max_tokens=60)
            await asyncio.sleep(0.2)
            waiting = len(slow.buffer.events)
            rest = tuple([e.token async for e in slow])
            return quick.tokens, waiting, rest

    quick, waiting, rest = run(work())
    assert [quick, rest] == truths(model, [prompt(2), prompt(1)], 60, [quick, rest])
    assert 4 <= waiting <= 4 + 2  # and what was in the air


def test_readers_that_stop_do_not_keep_others_out(model):
    async def work():
        async with AsyncEngine(Engine(model, EngineConfig(max_running=2)), buffer=2) as engine:
            idle = [engine.stream(prompt(k), max_tokens=30) for k in (1, 2)]
            for stream in idle:
                await stream.wait_submitted()
            done = await engine.generate(prompt(3), max_tokens=10)
            return done.tokens, [tuple([e.token async for e in stream]) for stream in idle]

    done, idle = run(work())
    assert done == truth(model, prompt(3), 10) and idle == truths(model, [prompt(1), prompt(2)], 30, idle)


def test_leaving_a_stream_cancels_it(model):
    async def work():
        engine = AsyncEngine(Engine(model))
        async with engine.stream(prompt(1), max_tokens=3000) as stream:
            await anext(stream)
        task = asyncio.create_task(engine.generate(prompt(2), max_tokens=3000))
        while not engine.engine.core.scheduler.running:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        stats = await engine.stats()
        await engine.close()
        return stats, engine.engine

    stats, engine = run(work())
    assert stats.running == stats.waiting == 0 and stats.finished["cancelled"] == 2 and not engine.core.outputs.states


def test_a_cancelled_request_has_a_last_event(model):
    async def work():
        async with AsyncEngine(Engine(model)) as engine:
            stream = engine.stream(prompt(1), max_tokens=3000)
            [id] = await stream.wait_submitted()
            await anext(stream)
            await engine.cancel(id)
            return [e async for e in stream]

    events = run(work())
    assert events[-1].finish_reason == "cancelled" and not any(e.finish_reason for e in events[:-1])


@pytest.mark.parametrize("finish", [True, False])
def test_close_finishes_or_cancels(model, finish):
    async def work():
        engine = AsyncEngine(Engine(model), buffer=3)
        n = 40 if finish else 3000  # too many to end before they are cancelled
        tasks = [asyncio.create_task(engine.generate(prompt(k), max_tokens=n)) for k in range(3)]
        unread = engine.stream(prompt(7), max_tokens=40)
        await unread.wait_submitted()
        await asyncio.sleep(0.05)
        await engine.close(finish=finish)
        late = await asyncio.gather(engine.generate(prompt(1)), return_exceptions=True)
        return await asyncio.gather(*tasks, return_exceptions=True), late, engine.thread.alive

    done, [late], alive = run(work())
    assert isinstance(late, mlxrt.EngineClosed) and not alive
    if finish:
        got = [d.tokens for d in done]
        assert got == truths(model, map(prompt, range(3)), 40, got)
    else:
        assert all(isinstance(d, mlxrt.EngineClosed) for d in done)


def test_the_threads_death_reaches_every_caller(model):
    async def work():
        inner = Engine(model)
        engine = AsyncEngine(inner)
        tasks = [asyncio.create_task(engine.generate(prompt(k), max_tokens=2000)) for k in range(4)]
        await asyncio.sleep(0.1)

        def fail(step):
            raise RuntimeError("the device is gone")

        inner.core.runner.launch = fail
        done = await asyncio.gather(*tasks, engine.generate(prompt(9)), return_exceptions=True)
        late = await asyncio.gather(engine.generate(prompt(9)), return_exceptions=True)
        await engine.close()
        return [*done, *late]

    for error in run(work()):
        assert isinstance(error, mlxrt.EngineFailed) and "the device is gone" in str(error)


def test_errors_of_one_request_are_its_own(model):
    def fail(row):
        raise KeyError("mine")

    async def work():
        async with AsyncEngine(Engine(model, EngineConfig(max_queue=2))) as engine:
            bad = engine.generate(prompt(1), on_logits=fail)
            wrong = engine.generate((VOCAB,))
            good = engine.generate(prompt(2), max_tokens=7)
            return await asyncio.gather(bad, wrong, good, return_exceptions=True)

    bad, wrong, good = run(work())
    assert isinstance(bad, KeyError) and isinstance(wrong, mlxrt.BadRequest)
    assert good.tokens == truth(model, prompt(2), 7)


def test_a_conversation(tmp_path):
    sync = Engine(spoken("gemma"), tokenizer=tokenizer()).session("s", max_tokens=6)
    want = [sync.say("why?").text, sync.say("no").text]

    async def work():
        async with AsyncEngine(Engine(spoken("gemma"), tokenizer=tokenizer())) as engine:
            session = engine.session("s", max_tokens=6)
            first = await (await session.say("why?")).text()
            other = session.fork()
            second, again = await asyncio.gather((await session.say("no")).text(), (await other.say("no")).text())
            other.rewind()
            await other.save(tmp_path / "state")
            restored = await AsyncSession.restore(engine, tmp_path / "state", max_tokens=6)
            assert restored.messages == other.messages
            later = await (await restored.say("no")).completion()
            assert later.cached_tokens
            return [first, second], again, later.text

    got, again, later = run(work())
    assert got == want and again == later == want[1]


def test_a_stopped_reply_is_kept_as_far_as_it_came():
    async def work():
        async with AsyncEngine(Engine(spoken("gemma"), tokenizer=tokenizer()), buffer=4) as engine:
            session = engine.session("s", max_tokens=400, ignore_eos=True)
            reply = await session.say("why?")
            assert "not at its end" in repr(reply)
            await anext(reply)
            await reply.stop()  # the buffer holds it back: it cannot have ended before
            done = await reply.completion()
            assert done.finish_reason == "cancelled" and 0 < len(done.tokens) < 400
            assert session.messages[-1] == done.to_message() and session.tokens[-len(done.tokens) :] == done.tokens
            assert repr(session) == f"<AsyncSession: 1 turn, {len(session.tokens)} tokens>"
            other = await session.say("no")
            await anext(other)
            await other.aclose()
            assert session.messages[-1] == done.to_message()
            return True

    assert run(work())
