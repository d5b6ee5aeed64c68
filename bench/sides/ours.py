"""mlxrt with its default settings.

Argument: FOLDER. Questions: {prompt, max_tokens} -> {tokens, at: seconds from the call to each token, blas};
{gap: [a, b], prompt} -> how far logit b lies below logit a after the prompt.
"""

import sys
import time
from typing import Any

import mlxrt
from bench.sides.serving import serve
from mlxrt import blas


def timed(engine: mlxrt.Engine, prompt: list[int], max_tokens: int) -> dict[str, Any]:
    tokens, at = [], []
    start = time.perf_counter()
    for event in engine.stream(prompt, max_tokens=max_tokens, ignore_eos=True):
        at.append(time.perf_counter() - start)
        tokens.append(event.token)
        if event.timings and event.timings.cached_tokens:
            raise SystemExit(f"{event.timings.cached_tokens} prompt tokens came from the cache: nothing was measured")
    if engine.store is not None:
        engine.store.clear()  # mlx-lm forgets too: every round starts with the same memory
    return {"tokens": tokens, "at": at, "blas": blas.running()}


def main() -> None:
    engine = mlxrt.load(sys.argv[1])

    def reply(question: dict[str, Any]) -> Any:
        if "gap" in question:
            a, b = question["gap"]
            logits = engine.score(question["prompt"])[-1]
            return (logits[a] - logits[b]).item()
        return timed(engine, question["prompt"], question["max_tokens"])

    serve(reply)


if __name__ == "__main__":
    main()
