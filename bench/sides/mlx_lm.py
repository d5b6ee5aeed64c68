"""mlx-lm's own loop (`generate_step`: no text is made of the tokens), greedy, its default settings.

Arguments: FOLDER, then `same-blas` (mlxrt's choice is loaded first) or `as-shipped`. Question: {prompt, max_tokens}
-> {tokens, at: seconds from the call to each token, blas}.
"""

import sys
import time
from typing import Any

from bench.sides.serving import serve


def main() -> None:
    folder, choice = sys.argv[1:]
    if choice == "same-blas":
        import mlxrt  # noqa: F401  it loads the BLAS before MLX
    import mlx.core as mx
    from mlx_lm import load
    from mlx_lm.generate import generate_step

    from mlxrt import blas

    model, *_ = load(folder)

    def reply(question: dict[str, Any]) -> dict[str, Any]:
        tokens, at = [], []
        start = time.perf_counter()
        prompt = mx.array(question["prompt"])
        for token, _ in generate_step(prompt, model, max_tokens=question["max_tokens"]):
            at.append(time.perf_counter() - start)
            tokens.append(int(token))
        return {"tokens": tokens, "at": at, "blas": blas.running()}

    serve(reply)


if __name__ == "__main__":
    main()
