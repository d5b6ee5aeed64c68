"""Small programs that use an engine and end in one way each: `python -m tests.support.exit_programs WAY`.

The model is a toy, or the one that MLXRT_EXIT_MODEL names. The threads that step compile a function whose result takes
long to die: MLX destroys it when a thread ends, and a process that ends at the same moment aborts. So one run shows
what a real model shows in one run of two.
"""

import asyncio
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

# isort: off
from mlxrt import AsyncEngine, Engine, Request, SamplingParams, load  # before MLX: it brings the BLAS
import mlx.core as mx
# isort: on

from tests.support.toy_models import make

KEPT = []  # to the end of the process
PROMPT = tuple(range(12))
REAL_MODEL = "MLXRT_EXIT_MODEL"


class SlowToDie:
    def __del__(self):
        for _ in range(150):
            time.sleep(0.002)  # each takes Python's lock again


@mx.compile
def compiled(x: mx.array):
    return x + 1, SlowToDie()  # kept with the compiled function, by the thread that called it


def compile_here(row) -> None:
    compiled(mx.ones(4))


def request(n: int = 3) -> Request:
    return Request(tokens=PROMPT, params=SamplingParams(max_tokens=n), on_logits=compile_here)


def engine() -> Engine:
    return load(model) if (model := os.environ.get(REAL_MODEL)) else Engine(make("wf"))


def ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


# With asyncio


async def returns() -> None:
    async with AsyncEngine(engine()) as e:
        await e.generate(request())


async def raises() -> None:
    async with AsyncEngine(engine()) as e:
        await e.generate(request())
        raise ValueError("a fault of the program's own")


async def exits() -> None:
    async with AsyncEngine(engine()) as e:
        await e.generate(request())
        sys.exit(3)


async def is_interrupted() -> None:
    async with AsyncEngine(engine()) as e:
        async for _ in e.stream(request(3000)):
            ctrl_c()


async def leaves_streams_unread() -> None:
    async with AsyncEngine(engine(), buffer=2) as e:
        streams = [e.stream(request(n)) for n in (3, 60)]
        await streams[1].wait_submitted()


async def never_closes() -> None:
    await AsyncEngine(engine()).generate(request())


async def never_closes_while_running() -> None:
    e = AsyncEngine(engine(), buffer=4)
    streams = [e.stream(request(3000)) for _ in range(3)]
    await anext(streams[0])
    KEPT.append((e, streams))  # no finaliser runs either


async def scores_in_a_thread() -> None:
    async with AsyncEngine(engine()) as e:
        await asyncio.to_thread(e.engine.generate, request())


async def cannot_load() -> None:
    await asyncio.to_thread(load_too_large)


def load_too_large() -> None:
    compiled(mx.ones(4))
    load("shape:qwen3-8b", memory="1G")


# Without


def returns_sync() -> None:
    with engine() as e:
        e.generate(request())


def raises_sync() -> None:
    with engine() as e:
        next(e.stream(request(3000)))
        raise ValueError("a fault of the program's own")


def exits_sync() -> None:
    e = engine()
    KEPT.append(e.stream(request(3000)))
    next(KEPT[-1])
    sys.exit(3)


def is_interrupted_sync() -> None:
    for _ in engine().stream(request(3000)):
        ctrl_c()


def has_threads() -> None:
    e = engine()
    with ThreadPoolExecutor(2) as pool:
        [f.result() for f in [pool.submit(e.generate, request()) for _ in range(2)]]


def has_daemon_threads() -> None:
    e, begun = engine(), threading.Event()

    def work() -> None:
        for _ in e.stream(request(4000)):
            begun.set()
            time.sleep(0.001)

    threading.Thread(target=work, daemon=True).start()
    begun.wait()


# What each has to end with: an exit code, or the signal that a shell would see.
ENDINGS = {
    "returns": 0, "raises": 1, "exits": 3, "is_interrupted": -signal.SIGINT, "leaves_streams_unread": 0,
    "never_closes": 0, "never_closes_while_running": 0, "scores_in_a_thread": 0, "cannot_load": 1,
    "returns_sync": 0, "raises_sync": 1, "exits_sync": 3, "is_interrupted_sync": -signal.SIGINT,
    "has_threads": 0, "has_daemon_threads": 0,
}  # fmt: skip


def find_fault(way: str, code: int, stderr: bytes) -> str:
    """What is wrong with a process that ended so; empty when nothing is."""
    if code != ENDINGS[way]:
        return f"exit code {code}, not {ENDINGS[way]}: {stderr.decode()}"
    if b"terminate called" in stderr or (code == 0 and stderr) or (code < 0 and b"KeyboardInterrupt" not in stderr):
        return f"exit code {code}, but: {stderr.decode()}"
    return ""


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's background job would ignore it
    program = globals()[sys.argv[1]]
    if asyncio.iscoroutinefunction(program):
        asyncio.run(program())
    else:
        program()
