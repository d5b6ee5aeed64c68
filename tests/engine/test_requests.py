"""The life of a request: priorities, deadlines, the queue's end, one last event whatever happens."""

import asyncio
import weakref
from collections import Counter
from itertools import pairwise

import pytest

import mlxrt
from mlxrt import Engine, EngineConfig, Finish, Request, SamplingParams
from mlxrt.engine.engine import Source
from mlxrt.engine.kv_allocator import KVAllocator
from mlxrt.engine.queue import WaitingQueue
from mlxrt.engine.scheduler import Limits, Scheduler
from mlxrt.engine.sequence import Sequence
from tests.support.oracle import truth
from tests.support.state_machine.kinds import model as spoken
from tests.support.state_machine.kinds import tokenizer
from tests.support.toy_models import KINDS, VOCAB, make

from ..support.log_lines import capture_log


def prompt(k: int, n: int = 12) -> tuple[int, ...]:
    return tuple((k * 31 + j * 7) % VOCAB for j in range(n))


def ask(k: int, n: int = 8, length: int = 12, **options) -> Request:
    return Request(tokens=prompt(k, length), params=SamplingParams(max_tokens=n), **options)


@pytest.fixture(scope="module")
def model():
    return make("wf")


def firsts(engine, requests) -> list[int]:
    """The order in which requests get their first token."""
    seen: dict[int, None] = {}
    with engine.stream(requests) as stream:
        order = list(stream.ids)
        for event in stream:
            seen.setdefault(order.index(event.id))
    return list(seen)


def test_first_come_first_served_within_a_priority(model):
    engine = Engine(model, EngineConfig(max_running=1))
    assert firsts(engine, [ask(k, 3) for k in range(5)]) == [0, 1, 2, 3, 4]
    assert firsts(engine, [ask(k, 3, priority=p) for k, p in enumerate((0, 2, -1, 2, 1))]) == [1, 3, 4, 0, 2]


def test_waiting_makes_up_for_priority():
    line = WaitingQueue(age=10.0)

    def one(id, priority, now):
        seq = Sequence(id, Request(tokens=(1,), priority=priority), (1,))
        line.add(seq, now)
        return seq

    low, high, later, last = one(0, 0, 0.0), one(1, 1, 9.0), one(2, 1, 11.0), one(3, 0, 2.0)
    assert [line.pop() for _ in range(4)] == [high, low, later, last]
    a, b = one(4, 0, 0.0), one(5, 0, 0.0)
    line.remove(a)
    line.requeue(a)
    assert len(line) == 2 and a in line and [line.pop(), line.pop(), line.pop()] == [a, b, None]


def test_a_short_prompt_overtakes_a_long_one_that_goes_on(model):
    engine = Engine(model, EngineConfig(chunk=16))
    assert firsts(engine, [ask(1, 2, 200), ask(2, 2, 200), ask(3, 2, 6)]) == [2, 0, 1]


def test_the_queue_is_bounded(model):
    engine = Engine(model, EngineConfig(max_queue=3, max_running=1))
    streams = [engine.stream(ask(k, 40)) for k in range(3)]
    with pytest.raises(mlxrt.QueueFull, match=r"3 requests wait and 0 run; the queue holds 3"):
        engine.stream(ask(9))
    next(streams[0])
    streams.append(engine.stream(ask(3, 5)))
    with pytest.raises(mlxrt.QueueFull, match=r"3 requests wait and 1 run"):
        engine.stream(ask(9))
    assert [tuple(e.token for e in s) for s in streams[1:]] == [
        truth(model, prompt(k), n) for k, n in ((1, 40), (2, 40), (3, 5))
    ]


def test_deadlines_end_what_runs_and_what_waits(model):
    engine = Engine(model, EngineConfig(max_running=1, ahead=2))
    now = [0.0]
    engine.core.scheduler.clock = lambda: now[0]
    running, waiting, other = (
        engine.stream([ask(1, 500, deadline_s=5)]),
        engine.stream([ask(2, deadline_s=3)]),
        engine.stream(ask(3, 9)),
    )
    got = [next(running) for _ in range(4)]
    now[0] = 6.0
    got += list(running)
    assert got[-1].finish_reason == "deadline" and got[-1].token is None and got[-1].timings
    said = tuple(e.token for e in got[:-1])
    assert said == truth(model, prompt(1), len(said)) and len(said) >= 4
    [last] = list(waiting)
    assert last.finish_reason == "deadline"
    assert tuple(e.token for e in other) == truth(model, prompt(3), 9)
    now[0] = 0.0
    done = engine.generate(ask(4, 3, deadline_s=1))
    assert done.finish_reason == "length"


@pytest.mark.parametrize(
    "bad", [dict(priority=1.5), dict(priority=10**6), dict(deadline_s=0), dict(deadline_s=float("nan"))]
)
def test_bad_numbers_are_refused(bad):
    with pytest.raises(mlxrt.BadRequest, match=next(iter(bad))):
        Request(tokens=(1,), **bad)


def test_options_reach_the_request(model):
    seen = []
    engine = Engine(model, on_event=seen.append)
    done = engine.generate(prompt(1), max_tokens=2, priority=3, deadline_s=100.0)
    assert done.finish_reason == "length"
    assert [e.kind for e in seen] == ["queued", "started", "first_token", "finished"]
    assert seen[-1].finish_reason == "length" and seen[-1].generated_tokens == 2 and seen[-1].prompt_tokens == 12


def test_every_request_ends_exactly_once(model):
    ends = Counter()

    def record_event(event):
        if event.kind == "finished":
            ends[event.id, event.finish_reason] += 1

    engine = Engine(
        model, EngineConfig(max_running=2, chunk=8), source=Source(eos=frozenset([5, 6, 7])), on_event=record_event
    )
    streams = [engine.stream(ask(k, 5 + 5 * k, deadline_s=1e-9 if k == 4 else None)) for k in range(8)]
    for _ in range(3):
        next(streams[0])
    streams[1].close()
    streams[0].close()
    engine.cancel(streams[2].ids[0])
    finals = [[e.finish_reason for e in s if e.finish_reason] for s in streams]
    assert finals[:3] == [[], [], [Finish.CANCELLED]] and all(len(f) == 1 for f in finals[2:])
    assert sorted(id for id, _ in ends) == list(range(8)) and set(ends.values()) == {1}
    assert finals[4] == [Finish.DEADLINE]


def test_a_failing_text_ends_its_own_request_only():
    made = spoken("full")
    engine = Engine(made, tokenizer=tokenizer())
    good, bad = engine.stream((1, 2, 3), max_tokens=9), engine.stream((4, 5, 6), max_tokens=9)
    state = engine.core.outputs.states[bad.ids[0]]

    class Broken:
        matched, matched_stop = False, None

        def push(self, text):
            raise ValueError("a matcher of mine")

    state.matcher = Broken()
    last = list(bad)[-1]
    assert last.finish_reason == "error" and isinstance(last.error, ValueError)
    assert tuple(e.token for e in good) == truth(made, (1, 2, 3), 9)
    assert engine.stats().running == 0 and not engine.core.outputs.states


def test_a_failing_watcher_is_left_out(model):
    lines = capture_log()

    def fail(event):
        raise KeyError("mine")

    engine = Engine(model, on_event=fail)
    assert engine.generate(prompt(1), max_tokens=3).tokens == truth(model, prompt(1), 3)
    assert len(lines) == 1 and "not called any more" in lines[0]


@pytest.mark.parametrize("raised", [KeyError("mine"), asyncio.CancelledError("mine")])
@pytest.mark.parametrize("at", ["first", "last", "every", "cancel", "close"])
def test_a_failing_listener_ends_its_own_request_only(model, at, raised):
    lines, heard = capture_log(), []
    engine = Engine(model)

    def listen(event):
        heard.append(event)
        if at in ("first", "every") or event.finish_reason:
            raise raised

    good, id = engine.stream(prompt(1), max_tokens=9), engine.submit(ask(2, 4), listen)
    if at in ("cancel", "close"):
        next(good)
        engine.cancel(id) if at == "cancel" else engine.close()
    if at != "close":
        assert tuple(e.token for e in good) == truth(model, prompt(1), 9)[at == "cancel" :]
    assert len([line for line in lines if "listener of request" in line]) == 1
    assert heard[-1].finish_reason == {"last": "length", "cancel": "cancelled", "close": "cancelled"}.get(at, "error")
    assert at not in ("first", "every") or (len(heard) == 2 and "mine" in str(heard[-1].error))
    assert id not in engine.core.outputs.states


@pytest.mark.parametrize("place", ["on_event", "on_logits"])
def test_what_is_no_exception_ends_no_engine(model, place):
    """asyncio.CancelledError passes `except Exception`."""

    def fail(_):
        raise asyncio.CancelledError("mine")

    engine = Engine(model, on_event=fail if place == "on_event" else None)
    good = engine.stream(prompt(1), max_tokens=5)
    if place == "on_logits":
        with pytest.raises(mlxrt.BadRequest, match="mine"):
            engine.generate(prompt(2), on_logits=fail)
    assert tuple(e.token for e in good) == truth(model, prompt(1), 5)


def test_deadlines_of_requests_that_ended_are_forgotten(model):
    engine = Engine(model)
    for k in range(100):
        with engine.stream(ask(k, deadline_s=1e6)) as stream:
            request = weakref.ref(engine.core.outputs.states[stream.ids[0]].seq)
        assert request() is None
    assert len(engine.core.scheduler.deadlines) <= 64


@pytest.mark.parametrize("kind", ["full", "gemma", "hybrid", "rotating-keep"])
def test_a_shared_prefix_is_computed_once(kind):
    model = KINDS[kind]()
    engine = Engine(model, EngineConfig(chunk=16))
    shared = prompt(1, 128)
    requests = [Request(tokens=(*shared, *prompt(k, 9)), params=SamplingParams(max_tokens=4)) for k in range(2, 8)]
    done = engine.generate(requests)
    assert [d.tokens for d in done] == [truth(model, r.tokens, 4) for r in requests]
    total = sum(len(r.tokens) for r in requests)
    least = 128 + 6 * 9
    spare = 6 * (4 + 16)  # decoded tokens, and what lies behind the last checkpoint
    assert engine.core.positions <= least + spare < total / 2
    assert all(d.cached_tokens >= 112 for d in done[1:])


def test_followers_of_a_cancelled_prompt_go_on(model):
    engine = Engine(model, EngineConfig(chunk=8))
    shared = prompt(1, 96)
    streams = [engine.stream((*shared, k), max_tokens=3) for k in range(4)]
    engine.step()
    assert len(engine.core.scheduler.running) == 1 and len(engine.core.scheduler.waiting) == 3
    streams[0].close()
    streams[1].close()
    for k in (2, 3):
        assert tuple(e.token for e in streams[k]) == truth(model, (*shared, k), 3)


def test_streams_wait_no_longer_than_the_bound(model):
    engine = Engine(model, EngineConfig(chunk=64, max_stall=10))
    stream = engine.stream(ask(1, 80))
    next(stream)
    rest = engine.stream([ask(k, 4, 150) for k in range(2, 6)] + [ask(9, 4, 1)])
    said = [e.token for e in stream]
    assert len(said) == 79
    list(rest)
    stats = engine.stats()
    assert stats.stall_bound == 10 and 0 < stats.longest_stall <= 10
    free = Scheduler(KVAllocator(engine.core.pools.empty_states, None), Limits(chunk=64))
    assert free.stall_bound == 64


def test_streams_with_callbacks_wait_no_longer_either(model):
    """Their next token needs the last one on the host, so they take part in every second step only."""
    engine = Engine(model, EngineConfig(chunk=16, max_stall=12, ahead=3))
    seen, prompted = [], []

    def look(row):
        seen.append(len(row.tokens))
        prompted.append(engine.core.scheduler.prefilled)

    stream = engine.stream(Request(tokens=prompt(1), params=SamplingParams(max_tokens=30), on_logits=look))
    next(stream)
    others = engine.stream([ask(k, 2, 120) for k in range(2, 5)])
    list(stream), list(others)
    gaps = [b - a for a, b in pairwise(prompted)]
    assert max(gaps) <= 12 and engine.stats().longest_stall <= 12


def test_a_bound_in_milliseconds_is_kept_as_measured(model):
    engine = Engine(model, EngineConfig(chunk=64, max_stall_ms=5.0))
    assert engine.stats().stall_bound == 32
    stream = engine.stream(ask(1, 40))
    next(stream)
    list(engine.stream([ask(k, 2, 150) for k in range(2, 6)]))
    rate = engine.core.metrics.prefill_rate
    assert engine.stats().stall_bound == max(1, min(64, int(rate * 5e-3)))


def test_stats_count(model):
    engine = Engine(model, EngineConfig(chunk=16))
    engine.generate([ask(k, 6, 40) for k in range(3)])
    engine.generate(ask(0, 6, 40))
    stats = engine.stats()
    assert stats.requests == 4 and stats.finished == {"length": 4} and stats.chunk == 16
    assert stats.output_tps > 0 and stats.input_tps > 0
    assert 0 < stats.cached_share == stats.reused_tokens / 160
    assert sum(stats.stalls.values()) == 4 * 5 and set(stats.first_token_ms) == set(stats.inter_token_ms) == {
        50,
        90,
        99,
    }
    assert stats.bytes["weights"] > 0 and stats.bytes["kv"] == stats.kv_allocated and stats.buffers > 8


def test_requests_without_memory_end_with_numbers_and_the_engine_goes_on(model):
    engine = Engine(model, EngineConfig(max_running=1, kv_memory="4M"))
    held = [g.pool.allocate(g.pool.available) for g in engine.core.pools.groups]
    streams = [engine.stream(ask(k, 4)) for k in (1, 2)]
    assert engine.step() and not engine.step()
    for stream in streams:
        [last] = list(stream)
        assert last.finish_reason == "error" and isinstance(last.error, mlxrt.WontFit)
        assert "0 of 12 tokens in memory" in str(last.error) and "(1 blocks wanted, 0 of" in str(last.error)
    held.clear()
    assert engine.generate(ask(3, 4)).tokens == truth(model, prompt(3), 4)
