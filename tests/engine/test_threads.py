"""Threads that share an engine: right tokens, typed errors, nobody kept out, nothing left behind."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest

import mlxrt
from mlxrt import Engine, EngineConfig, Request, SamplingParams
from mlxrt.engine.threads import FairLock
from tests.support.oracle import logits, truth, truths
from tests.support.toy_models import KINDS, VOCAB, make


def prompt(k: int, n: int = 12) -> tuple[int, ...]:
    return tuple((k * 31 + j * 7) % VOCAB for j in range(n))


def together(*acts):
    """Run each in a thread of its own; what each returned or raised."""
    with ThreadPoolExecutor(len(acts)) as pool:
        running = [pool.submit(act) for act in acts]
        return [r.exception(timeout=120) or r.result() for r in running]


@pytest.mark.parametrize("kind", ["full", "everything"])
@pytest.mark.parametrize("compiled", [False, True])
def test_eight_threads_get_the_tokens_they_would_get_alone(kind, compiled):
    model = KINDS[kind]()
    engine = Engine(model, EngineConfig(chunk=16, max_running=5, compile=compiled))

    def work(k):
        if k % 4 == 3:
            return tuple(mx.argmax(engine.score(prompt(k)), axis=-1).tolist())
        if k % 2:
            return tuple(e.token for e in engine.stream(prompt(k), max_tokens=9 + k))
        return engine.generate(prompt(k), max_tokens=9 + k).tokens

    got = together(*(lambda k=k: [work(k), work(k + 8)] for k in range(8)))
    for k, pair in enumerate(got):
        for i, found in zip((k, k + 8), pair):
            rows = logits(model, prompt(i))
            want = tuple(mx.argmax(rows, axis=-1).tolist()) if i % 4 == 3 else truth(model, prompt(i), 9 + i)
            assert found == want
    engine.core.prefix_cache.clear()
    stats = engine.stats()
    assert stats.running == stats.waiting == stats.kv_bytes == 0 and not engine.core.outputs.states


def test_close_gives_every_caller_a_typed_error():
    engine = Engine(make("wf"))
    begun = threading.Semaphore(0)

    def work(k):
        for i, _event in enumerate(engine.stream(prompt(k), max_tokens=4000)):
            if i == 2:
                begun.release()

    def close():
        for _ in range(6):
            begun.acquire()
        engine.close()

    *callers, closer = together(*(lambda k=k: work(k) for k in range(6)), close)
    assert closer is None and [type(c) for c in callers] == [mlxrt.EngineClosed] * 6
    with pytest.raises(mlxrt.EngineClosed):
        engine.generate(prompt(1))


def test_a_consumer_that_raises_harms_nobody():
    model = make("wf")
    engine = Engine(model)

    def bad():
        for i, _event in enumerate(engine.stream(prompt(1), max_tokens=60)):
            if i == 3:
                raise KeyError("mine")

    error, *others = together(bad, *(lambda k=k: engine.generate(prompt(k), max_tokens=30).tokens for k in (2, 3, 4)))
    assert isinstance(error, KeyError)
    assert others == truths(model, map(prompt, (2, 3, 4)), 30, others)
    assert engine.generate(prompt(5), max_tokens=5).tokens == truth(model, prompt(5), 5)


def test_a_failing_step_stops_the_engine_for_everybody():
    engine = Engine(make("f"))
    streams = [engine.stream(prompt(k), max_tokens=500) for k in range(3)]
    next(streams[0])

    def fail(step):
        raise RuntimeError("the device is gone")

    engine.core.runner.launch = fail
    got = together(*(lambda s=s: list(s) for s in streams))
    assert [type(e) for e in got] == [mlxrt.EngineFailed] * 3
    with pytest.raises(mlxrt.EngineFailed, match="the device is gone"):
        engine.generate(prompt(1))


def test_a_late_request_does_not_wait_for_the_stream_before_it():
    engine = Engine(make("f"))
    done, order = threading.Event(), []

    def long():
        for i, _event in enumerate(engine.stream(prompt(1), max_tokens=150)):
            if i == 5:
                done.set()
        order.append("long")

    def short():
        done.wait()
        engine.generate(prompt(2), max_tokens=4)
        order.append("short")

    together(long, short)
    assert order == ["short", "long"]


def test_a_callback_may_cancel_and_close_but_not_wait():
    model = make("f")
    engine = Engine(model)
    other = engine.stream(prompt(1), max_tokens=50)
    next(other)
    [id] = other.ids

    def cancel(row):
        engine.cancel(id)

    assert engine.generate(prompt(2), max_tokens=4, on_logits=cancel).tokens == truth(model, prompt(2), 4)
    last = list(other)[-1]
    assert last.finish_reason == "cancelled" and last.token is None
    with pytest.raises(mlxrt.BadRequest, match="inside a step"):
        engine.generate(prompt(3), max_tokens=2, on_logits=lambda row: engine.generate(prompt(4)))
    with pytest.raises(mlxrt.EngineClosed):
        engine.generate(prompt(3), max_tokens=9, on_logits=lambda row: engine.close())


def test_a_listener_that_ends_the_program_does_not_keep_the_engine():
    """Its request ends as others leave the engine, who must not keep its lock."""
    model = make("f")
    engine = Engine(model)

    def listen(event):
        raise SystemExit

    id = engine.submit(Request(tokens=prompt(1), params=SamplingParams(max_tokens=50)), listen)
    with pytest.raises(SystemExit), engine.core.exclusive():
        engine.cancel(id, wait=False)
    with ThreadPoolExecutor() as pool:
        assert pool.submit(engine.generate, prompt(2), max_tokens=4).result(60).tokens == truth(model, prompt(2), 4)


def test_readers_may_take_their_answers_while_all_are_resumed():
    engine = Engine(make("f"))
    ids = [engine.submit(Request(tokens=prompt(k), params=SamplingParams(max_tokens=9))) for k in range(3)]
    for id in ids:
        engine.core.pause(id)
    resume, states = engine.core.scheduler.resume, engine.core.outputs.states

    def resume_and_take(seq):
        resume(seq)
        states.pop(seq.id)

    engine.core.scheduler.resume = resume_and_take
    engine.core.resume_all()
    assert not states


def test_the_lock_is_taken_in_order():
    lock, order = FairLock(), []
    lock.acquire()
    lock.acquire()

    def ask(k):
        lock.acquire()
        order.append(k)
        lock.release()

    threads = [threading.Thread(target=ask, args=(k,)) for k in range(5)]
    for k, t in enumerate(threads):
        t.start()
        while len(lock._waiters) <= k:
            time.sleep(0.001)
    assert not lock.try_acquire()
    lock.release()
    assert lock.mine and order == []
    lock.release()
    for t in threads:
        t.join(10)
    assert order == list(range(5)) and lock.try_acquire()


def test_sampled_rows_are_the_same_from_any_thread():
    model = make("wf")
    ask = [
        Request(tokens=prompt(k), params=SamplingParams(max_tokens=12, temperature=0.9, seed=k, top_p=0.9))
        for k in range(6)
    ]
    alone = [Engine(model).generate(r).tokens for r in ask]
    engine = Engine(model, EngineConfig(chunk=8))
    assert together(*(lambda r=r: engine.generate(r).tokens for r in ask)) == alone


def test_ctrl_c_waits_for_the_end_of_a_step(hears_ctrl_c):
    """So that the engine can be used afterwards, in a notebook say."""
    model = make("wf")
    engine = Engine(model)
    launch, calls = engine.core.runner.launch, []

    def pressed(step):
        calls.append(step)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return launch(step)

    engine.core.runner.launch = pressed
    with pytest.raises(KeyboardInterrupt):
        engine.generate(prompt(1), max_tokens=20)
    assert len(calls) == 3 and engine.stats().running == 0
    assert engine.generate(prompt(1), max_tokens=20).tokens == truth(model, prompt(1), 20)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_engines_that_are_closed_leave_no_threads_behind():
    def threads():
        return len(os.listdir("/proc/self/task"))

    if not os.path.isdir("/proc/self/task"):
        pytest.skip("the threads of a process can be counted on Linux only")
    Engine(KINDS["full"]()).close()
    before = threads()
    for _ in range(6):
        Engine(KINDS["full"]()).close()
    assert threads() <= before + 1
