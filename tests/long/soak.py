"""Many requests through one engine from many threads, some given up halfway: none lost, none twice, nothing left.

    python -m tests.long.soak [--requests 500] [--threads 32] [--sample 50] [--seed 1] [--model smollm2]

A sample of the answers is compared with runs alone. Exit code 1 where anything differs or is left behind.
"""

import argparse
import gc
import random
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import mlxrt
from mlxrt import Engine, EngineConfig, EngineEvent, Request, SamplingParams

import mlx.core as mx  # isort: skip  after mlxrt, which loads a BLAS

OPENINGS = (
    "Once upon a time there was a little", "The capital of France is", "In the beginning", "Write a list of",
    "My favourite food is", "The sea was", "def main():", "Why is the sky",
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    request: Request
    leave_after: int | None  # tokens after which its reader leaves


@dataclass
class Answer:
    tokens: tuple[int, ...]
    reason: str | None  # None: its reader left


def make_jobs(engine: Engine, count: int, chance: random.Random) -> list[Job]:
    heads = [engine.tokenizer.encode(text) for text in OPENINGS]
    jobs = []
    for _ in range(count):
        own = [chance.randrange(1000, 20_000) for _ in range(chance.randrange(0, 12))]
        hot = chance.random() < 0.3
        params = SamplingParams(
            max_tokens=chance.randrange(2, 14), temperature=0.8 if hot else 0.0, seed=chance.randrange(1 << 32)
        )
        request = Request(tokens=tuple(chance.choice(heads) + own), params=params, priority=chance.randrange(-1, 2))
        jobs.append(Job(request, chance.randrange(0, 6) if chance.random() < 0.25 else None))
    return jobs


def play(engine: Engine, job: Job) -> Answer:
    tokens: list[int] = []
    with engine.stream(job.request) as stream:
        if job.leave_after == 0:
            return Answer((), None)
        for event in stream:
            if event.token is not None:
                tokens.append(event.token)
            if event.finish_reason:
                return Answer(tuple(tokens), str(event.finish_reason))
            if len(tokens) == job.leave_after:
                return Answer(tuple(tokens), None)
    raise AssertionError("a stream ended without a last event")


def held(engine: Engine) -> dict[str, int]:
    """What nobody should hold now, and what MLX has given out beside the pools."""
    assert engine.core.prefix_cache is not None
    engine.core.prefix_cache.clear()
    with engine.core.exclusive():
        engine.core.runner.flush()
        mx.synchronize()
    gc.collect()
    mx.clear_cache()
    stats = engine.stats()
    return {
        "running": stats.running,
        "waiting": stats.waiting,
        "kv bytes": stats.kv_bytes,
        "stored nodes": stats.stored_nodes,
        "tickets": len(engine.core.outputs.states),
        "bytes beside the pools": mx.get_active_memory() - stats.kv_allocated,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--threads", type=int, default=32)
    parser.add_argument("--sample", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", default="smollm2")
    options = parser.parse_args()
    ends: Counter[int] = Counter()
    lock = threading.Lock()

    def record_event(event: EngineEvent) -> None:
        if event.kind == "finished":
            with lock:
                ends[event.id] += 1

    engine = mlxrt.load(options.model, EngineConfig(max_running=options.threads), on_event=record_event)
    chance = random.Random(options.seed)
    jobs = make_jobs(engine, options.requests, chance)
    engine.generate(jobs[0].request)
    ends.clear()
    before, began = held(engine), time.monotonic()
    with ThreadPoolExecutor(options.threads) as pool:
        answers = list(pool.map(lambda job: play(engine, job), jobs))
    spent, after = time.monotonic() - began, held(engine)
    sample = chance.sample(range(len(jobs)), min(options.sample, len(jobs)))
    problems = check_answers(engine, jobs, answers, ends, sample)
    leaked = after["bytes beside the pools"] - before["bytes beside the pools"]
    same = {k: v for k, v in after.items() if "beside" not in k} == {
        k: v for k, v in before.items() if "beside" not in k
    }
    if not same or leaked > 4096:
        problems.append(f"left behind: {after}, before: {before}")
    stats, left = engine.stats(), sum(a.reason is None for a in answers)
    print(
        f"{len(jobs)} requests from {options.threads} threads in {spent:.0f} s: {len(answers) - left} answered, {left} "
        f"given up, {sum(len(a.tokens) for a in answers)} tokens, {stats.preemptions} preemptions; "
        f"{min(options.sample, len(jobs))} compared with runs alone; leaked {max(leaked, 0)} bytes"
    )
    print("\n".join(problems) or "0 lost, 0 duplicated, 0 leaked, 0 different")
    engine.close()
    return 1 if problems else 0


def check_answers(
    engine: Engine, jobs: list[Job], answers: list[Answer], ends: Counter, sample: list[int]
) -> list[str]:
    problems = []
    if len(ends) != len(jobs) or set(ends.values()) != {1}:
        odd = [f"{id} {n} times" for id, n in ends.items() if n != 1]
        problems.append(f"{len(ends)} of {len(jobs)} requests ended; not once: {odd}")
    for job, answer in zip(jobs, answers):
        if answer.reason not in ("stop", "length", None):
            problems.append(f"{job} ended as {answer.reason}")
    for i in sample:
        alone = engine.generate(jobs[i].request)
        engine.core.prefix_cache.clear()
        got = answers[i].tokens
        if alone.tokens[: len(got)] != got or (answers[i].reason is not None and len(got) != len(alone.tokens)):
            problems.append(f"request {i} ({jobs[i]}): {got}, alone {alone.tokens}")
    return problems


if __name__ == "__main__":
    sys.exit(main())
