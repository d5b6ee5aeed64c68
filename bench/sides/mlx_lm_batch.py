"""mlx-lm's BatchGenerator under the same load, its default settings, mlxrt's choice of BLAS under it.

Setting: {folder}. Questions and answers as those of ours_batch.py; positions and stalls are counted where the model is
called, padding included.
"""

import time
from typing import Any

from mlxrt.bench.sides.serving import serve


class Counted:
    """A model that counts the positions it is given."""

    def __init__(self, model: Any):
        self._model, self.positions, self.prompted = model, 0, 0

    def __call__(self, tokens: Any, *args: Any, **options: Any) -> Any:
        self.positions += tokens.size
        self.prompted += tokens.size if tokens.shape[1] > 1 else 0
        return self._model(tokens, *args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_model"], name)


def play(model: Counted, question: dict[str, Any], batch: Any) -> dict[str, Any]:
    prompts = [*question["first"], *question["then"], *question["last"]]
    cut, computed = len(question["first"]), model.positions
    tokens: list[list[int]] = [[] for _ in prompts]
    at: list[list[float]] = [[] for _ in prompts]
    begun = [time.perf_counter()] * len(prompts)
    order = batch.insert(prompts[:cut], max_tokens=question["max_tokens"][:cut])
    open_, held, there, stall, seen = set(order), 0, 0, 0, [0] * len(prompts)
    while open_:
        _, given = batch.next()
        for response in given:
            k = order.index(response.uid)
            tokens[k].append(int(response.token))
            at[k].append(time.perf_counter())
            if len(tokens[k]) > 1 and k < cut:
                stall = max(stall, model.prompted - seen[k])
            seen[k] = model.prompted
            if response.finish_reason:
                open_.discard(response.uid)
        if len(order) == cut < len(prompts) and all(len(t) >= question["after"] for t in tokens[:cut]):
            begun[cut:] = [time.perf_counter()] * (len(prompts) - cut)
            order = order + batch.insert(prompts[cut:], max_tokens=question["max_tokens"][cut:])
            open_ |= set(order[cut:])
        if len(order) == len(prompts) and all(tokens) and not held:
            held, there = batch.prompt_cache_nbytes, sum(map(len, prompts)) + sum(map(len, tokens))
    ended = time.perf_counter()
    return {
        "tokens": tokens,
        "first": [a[0] - b for a, b in zip(at, begun)],
        "seconds": ended - begun[0],
        "positions": model.positions - computed,
        "stall": stall,
        "bound": None,
        "held": held,
        "there": there,
        "gap": max((b - a for a, b in zip(at[0], at[0][1:])), default=0.0),
        "preemptions": 0,
    }


class MlxLmUnderLoad:
    def __init__(self, setting: dict[str, Any]):
        from mlx_lm import load

        loaded, *_ = load(setting["folder"])
        self._model = Counted(loaded)

    def told(self) -> dict[str, Any]:
        return {"engine": "mlx-lm"}

    def reply(self, question: dict[str, Any]) -> dict[str, Any]:
        from mlx_lm.generate import BatchGenerator

        return play(self._model, question, BatchGenerator(self._model))


if __name__ == "__main__":
    serve(MlxLmUnderLoad)
