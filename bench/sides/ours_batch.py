"""mlxrt under a load: streams that run, prompts that arrive, what was computed and held meanwhile.

Setting: {folder}. Question: {first: [prompt], then: [prompt], last: [prompt], after, max_tokens: [n], stall,
chunk}: `first` are running streams; when each has `after` tokens, `then` arrive, and after them `last`.
The answer is what `play` returns.
"""

import time
from typing import Any

import mlxrt
from mlxrt import EngineConfig, Request, SamplingParams
from mlxrt.bench.sides.serving import serve


def ask(prompt: list[int], n: int) -> Request:
    return Request(tokens=tuple(prompt), params=SamplingParams(max_tokens=n, ignore_eos=True))


def play(engine: mlxrt.Engine, question: dict[str, Any]) -> dict[str, Any]:
    assert engine.store is not None
    engine.store.clear()
    prompts = [*question["first"], *question["then"], *question["last"]]
    requests = [ask(p, n) for p, n in zip(prompts, question["max_tokens"], strict=True)]
    cut = len(question["first"])
    computed = engine.runner.positions
    engine.scheduler.longest_stall = 0
    tokens: list[list[int]] = [[] for _ in requests]
    at: list[list[float]] = [[] for _ in requests]
    begun: list[float] = [time.perf_counter()] * len(requests)
    with engine.stream_of([engine.submit(r) for r in requests[:cut]]) as stream:
        order, held, there = list(stream.ids), 0, 0
        while stream.ids:
            event = next(stream)
            k = order.index(event.id)
            if event.error is not None:
                raise event.error
            tokens[k].append(int(event.token or 0))
            at[k].append(time.perf_counter())
            if len(order) == cut < len(requests) and all(len(t) >= question["after"] for t in tokens[:cut]):
                for i, request in enumerate(requests[cut:], cut):
                    begun[i] = time.perf_counter()
                    order.append(engine.submit(request))
                    stream.add(order[-1])
            if len(order) == len(requests) and all(tokens) and not held:  # everybody runs
                held, there = engine.stats().kv_live, sum(map(len, prompts)) + sum(map(len, tokens))
    ended = time.perf_counter()
    stats = engine.stats()
    return {
        "tokens": tokens,
        "first": [a[0] - b for a, b in zip(at, begun)],
        "seconds": ended - begun[0],
        "positions": engine.runner.positions - computed,
        "stall": stats.longest_stall,
        "bound": stats.stall_bound,
        "held": held,
        "there": there,
        "gap": max((b - a for a, b in zip(at[0], at[0][1:])), default=0.0),
        "preemptions": stats.preemptions,
    }


class OursUnderLoad:
    """An engine, loaded anew when a question wants another chunk or bound."""

    def __init__(self, setting: dict[str, Any]):
        self._folder = setting["folder"]
        self._engine, self._wanted = None, None  # type: mlxrt.Engine | None, tuple | None

    def told(self) -> dict[str, Any]:
        return {"engine": "mlxrt"}

    def reply(self, question: dict[str, Any]) -> dict[str, Any]:
        wanted = (question["chunk"], question["stall"])
        if self._engine is None or wanted != self._wanted:
            if self._engine is not None:
                self._engine.close()
            self._engine = mlxrt.load(self._folder, EngineConfig(chunk=wanted[0], max_stall=wanted[1]))
            self._wanted = wanted
        return play(self._engine, question)


if __name__ == "__main__":
    serve(OursUnderLoad)
