"""Random calls of the public API with odd arguments: every one of them gives a result or an error of mlxrt's own.

After each call nothing runs or waits, and now and then a plain request must be answered as at the beginning.
"""

import asyncio
import dataclasses
import gc
import math
import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import mlxrt
from mlxrt import AsyncEngine, Engine, EngineConfig, MlxrtError, Request, SamplingParams, Session
from mlxrt.text import Tokenizer
from tests.cli.conftest import write_tokenizer
from tests.support import toy_models as toy

import mlx.core as mx  # isort: skip  after mlxrt, which loads a BLAS

PLAIN = [5, 6, 7, 8, 9, 10]
CONTEXT = 48
EVERY = 25  # calls between two plain requests
MESSAGES = [{"role": "user", "content": "hi"}]


def holds_itself() -> list:
    found: list = []
    found.append(found)
    return found


VALUES = [
    None, True, False, 0, 1, -1, 3, 0.5, -0.5, 1.0, 2**31, 2**63, 2**64, -(2**40), 10**30, 10**5000, math.nan, math.inf,
    -math.inf, 1e308, 5e-324, "", "a", "5", "\0", "\ud800", " ", "nan", "on", "full", "x" * 99, b"", b"text",
    bytearray(b"a"), [], (), {}, set(), {1}, [None], [1, 2], (3,), [[1, 2], [3]], [[]], ["a", "b"], [1, "a"], [1.5],
    [True], [10**9], [-1], {"a": 1}, {1: 2}, {1: math.nan}, {None: None}, MESSAGES, [{}], [{"role": "user"}], [{"role":
    5, "content": 5}], {"role": "user", "content": "x"}, [{"role": "x", "content": []}], [{"role": "user", "content":
    None}], [{"role": "user", "content": [{"type": "image", "url": "x"}]}], object(), np.int64(3), np.int32(-1),
    np.float32(0.5), np.float64("nan"), np.bool_(True), np.array([1, 2]), np.array([]), np.array([[1, 2]]), np.array(3),
    np.array(["a"]), np.str_("a"), mx.array([1, 2]), mx.array(3), range(3), len, print, Request, SamplingParams(),
    EngineConfig(), Path("nowhere"), Ellipsis, NotImplemented, 1j, holds_itself(), lambda _: None,
]  # fmt: skip
FRESH = (lambda: iter([1, 2]), lambda: (i for i in "ab"), lambda: Request(tokens=(1, 2)))  # those that can be used up
PARAMS = [f.name for f in dataclasses.fields(SamplingParams)]
FIELDS = [f.name for f in dataclasses.fields(Request)]
OPTIONS = [*PARAMS, *(name for name in FIELDS if name not in ("prompt", "tokens", "messages", "params"))]
SETTINGS = [f.name for f in dataclasses.fields(EngineConfig)]


def make_engine() -> Engine:
    """A toy with a tokenizer, a chat template and a short context."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        tokenizer = Tokenizer.from_folder(Path(folder))
    mx.random.seed(0)
    model = type("Toy", (toy.Toy,), {"kinds": "wf"})(dataclasses.replace(toy.CONFIG, vocab_size=258))
    model.fuse()
    mx.eval(model.parameters())
    return Engine(model, EngineConfig(max_context=CONTEXT, chunk=16), tokenizer)


class OddCalls:
    """Plays random calls on one engine and collects what is wrong."""

    def __init__(self, seed: int):
        self.random, self.engine, self.folder = random.Random(seed), make_engine(), tempfile.TemporaryDirectory()
        self.wrong: list[str] = []
        self.tally: Counter[str] = Counter()
        self.right = self._answer()
        self._calls = [getattr(self, name) for name in sorted(dir(self)) if name.startswith("call_")]

    def _answer(self) -> tuple[int, ...]:
        return self.engine.generate(PLAIN, max_tokens=8, ignore_eos=True).tokens

    def odd(self) -> Any:
        at = self.random.randrange(len(VALUES) + len(FRESH))
        return VALUES[at] if at < len(VALUES) else FRESH[at - len(VALUES)]()

    def pick(self, names: list[str], most: int = 2) -> dict[str, Any]:
        return {name: self.odd() for name in self.random.sample(names, self.random.randint(0, most))}

    def options(self) -> dict[str, Any]:
        return {"max_tokens": 3} | self.pick(OPTIONS)

    def prompt(self) -> Any:
        return self.random.choice([lambda: [1, 2, 3], lambda: "text", lambda: MESSAGES, self.odd, self.odd])()

    def play(self, calls: int) -> None:
        for i in range(calls):
            call = self.random.choice(self._calls)
            self.tally["calls"] += 1
            try:
                call()
                self.tally["accepted"] += 1
            except MlxrtError:
                self.tally["refused"] += 1
            except Exception as error:  # what is not ours is the failure that is looked for
                self.wrong.append(f"call {i}, {call.__name__}: {type(error).__name__}: {error!s:.120}")
            self._check(i, call.__name__)

    def _check(self, i: int, name: str) -> None:
        if self.engine.stats().running:
            gc.collect()  # a stream that an exception's frames hold
        stats = self.engine.stats()
        if stats.running or stats.waiting or stats.kv_live:
            self.wrong.append(
                f"call {i}, {name}: {stats.running} run, {stats.waiting} wait, {stats.kv_live} bytes live"
            )
        if i % EVERY == 0 and self._answer() != self.right:
            self.wrong.append(f"call {i}, {name}: another answer to a plain request afterwards")

    # Data

    def call_sampling_params(self):
        SamplingParams(**self.pick(PARAMS, 3))

    def call_request(self):
        Request(**{self.random.choice(["prompt", "tokens", "messages"]): self.prompt()} | self.pick(FIELDS, 3))

    def call_engine_config(self):
        EngineConfig(**self.pick(SETTINGS, 3))

    def call_load(self):
        mlxrt.load(self.random.choice([self.folder.name, self.odd()]), **{"offline": True} | self.pick(SETTINGS))

    # Requests

    def call_generate(self):
        self.engine.generate(self.prompt(), **self.options())

    def call_generate_options(self):
        self.engine.generate([1, 2, 3], **self.options())

    def call_generate_messages(self):
        self.engine.generate(MESSAGES, **self.options())

    def call_stream(self):
        for _ in zip(range(2), self.engine.stream(self.prompt(), **self.options())):
            pass

    def call_submit(self):
        request = self.random.choice([Request(tokens=(1, 2), params=SamplingParams(max_tokens=2)), self.odd()])
        id = self.engine.submit(request, *(self.odd() for _ in range(self.random.randint(0, 2))))
        self.engine.cancel(id)
        self.engine.take(id)

    def call_read(self):
        call = self.random.choice(
            [self.engine.take, self.engine.cancel, lambda x: next(self.engine.stream_of(x), None)]
        )
        call(self.odd())

    def call_add(self):
        stream = self.engine.stream_of([])
        stream.add(self.odd())
        next(stream, None)

    def call_score(self):
        self.engine.score(self.prompt(), *(self.odd() for _ in range(self.random.randint(0, 1))))

    def call_cost(self):
        self.engine.cost(self.prompt(), **self.options())

    def call_encode(self):
        self.engine.encode(self.odd())

    def call_on_logits(self):
        method, value = self.random.choice(["top", "edit", "add", "ban", "allow"]), self.odd()
        self.engine.generate([1, 2, 3], max_tokens=2, on_logits=lambda row: getattr(row, method)(value))

    # Sessions

    def call_session(self):
        given = self.random.choice([{}, {"system": self.odd()}, {"on_overflow": self.odd()}])
        session = self.engine.session(**given, **self.options())
        session.say(self.random.choice(["a", self.odd()]), **self.options()).text  # noqa: B018

    def call_rewind(self):
        session = self.engine.session(max_tokens=2)
        session.say("a").text  # noqa: B018
        session.rewind(self.odd())

    def call_save(self):
        session = self.engine.session(max_tokens=2)
        session.say("a").text  # noqa: B018
        path = self.random.choice([Path(self.folder.name, "state"), Path(self.folder.name)])
        name = self.random.choice([None, "s", self.odd()])
        session.save(path, name)
        Session.restore(self.engine, path, self.random.choice([name, self.odd()]), **self.pick(OPTIONS))

    def call_restore(self):
        Session.restore(self.engine, self.odd())

    # asyncio

    def call_async(self):
        asyncio.run(self._call_async())

    async def _call_async(self):
        engine = AsyncEngine(make_shared(self.engine), **self.random.choice([{}, {"buffer": self.odd()}]))
        try:
            call = self.random.choice(
                [
                    lambda: engine.generate(self.prompt(), **self.options()),
                    lambda: engine.cancel(self.odd()),
                    lambda: engine.score(self.prompt()),
                    lambda: self._ask_session(engine),
                ]
            )
            await call()
        finally:
            await engine.close()

    async def _ask_session(self, engine: AsyncEngine):
        reply = await engine.session(max_tokens=2).say(self.odd(), **self.options())
        await reply.text()


def make_shared(engine: Engine) -> Engine:
    """Another engine of the same model, to be closed."""
    return Engine(engine.model, engine.config, engine.tokenizer)


def play(seeds: Iterator[int], calls: int) -> tuple[Counter[str], list[str]]:
    """So many calls for each seed, each on an engine of its own: what was counted, and what is wrong."""
    tally: Counter[str] = Counter()
    wrong = []
    for seed in seeds:
        program = OddCalls(seed)
        program.play(calls)
        program.engine.close()
        tally += program.tally
        wrong += [f"seed {seed}, {line}" for line in program.wrong]
    return tally, wrong
