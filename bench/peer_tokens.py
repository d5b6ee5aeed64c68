"""Greedy tokens of mlxrt against llama.cpp's on the same GGUF and the same prompt tokens.

llama.cpp rounds activations to 8 bit, we compute in float32: where two tokens are nearly level it may choose the
other one. A first difference is therefore allowed when its token is our second choice and less than GAP logits away.
Exit 0: enough prompts agree whole and every difference is of that kind. 1: not so. 2: a piece is missing.
"""

import argparse
import importlib.util
import sys
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

# isort: off
import mlxrt  # before MLX: it brings the BLAS
import mlx.core as mx

# isort: on
from mlxrt.bench.side import Side
from mlxrt.weights.source.resolve import locate

GAP = 0.5
MIN_WHOLE = 6
PROMPTS = (
    "What is the capital of France? Answer in one sentence.",
    "List the first ten prime numbers.",
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about the sea.",
    "What is 12 times 12?",
    "What is photosynthesis?",
    "Translate into French: Good morning, my friend.",
    "Write a Python function that adds two numbers.",
    "Who wrote Romeo and Juliet, and when?",
    "What are the days of the week?",
)


@dataclass(frozen=True)
class Verdict:
    """How one prompt's answers compare."""

    same: int  # tokens before the first difference
    whole: bool
    allowed: bool
    remark: str


def compare(engine: mlxrt.Engine, prompt: tuple[int, ...], ours: list[int], theirs: list[int]) -> Verdict:
    pairs = list(zip_longest(ours, theirs))
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    if same == len(pairs):
        return Verdict(same, True, True, "")
    a, b = pairs[same]
    if a is None or b is None:
        return Verdict(
            same, False, False, f"one ended at {same} tokens, the other went on with {b if a is None else a}"
        )
    logits = engine.score([*prompt, *ours[:same]])[-1]
    best: Any = mx.argsort(logits)[-2:].tolist()
    second, first = best
    gap: Any = (logits[first] - logits[b]).item()
    allowed = (first, second) == (a, b) and gap < GAP
    shown = engine.tokenizer.decode([a]), engine.tokenizer.decode([b])
    rank = "our second choice" if b == second else "NOT our second choice"
    return Verdict(same, False, allowed, f"ours {shown[0]!r}, llama.cpp {shown[1]!r}: {rank}, gap {gap:.3f}")


def answers(engine: mlxrt.Engine, gguf: str, n: int, count: int, threads: int) -> list[tuple[str, Verdict]]:
    texts = PROMPTS[:count]
    prompts = [engine.encode(mlxrt.Request(messages=({"role": "user", "content": text},))) for text in texts]
    found = []
    context = max(map(len, prompts)) + n + 1
    with Side("llama.cpp", {"gguf": gguf, "context": context, "threads": threads}) as peer:
        for text, prompt in zip(texts, prompts):
            theirs = peer.ask(do="generate", prompt=prompt, max_tokens=n, ends=True)["tokens"]
            ours = list(engine.generate(list(prompt), max_tokens=n).tokens)
            found.append((text, compare(engine, prompt, ours, theirs)))
    return found


def report(found: list[tuple[str, Verdict]], n: int) -> int:
    print(f"greedy tokens, mlxrt against llama.cpp on the same GGUF, up to {n} tokens (or to the end token)")
    for text, v in found:
        state = "equal" if v.whole else "allowed" if v.allowed else "WRONG"
        print(f"  {state:8} {v.same:3} tokens  {text[:52]:52}  {v.remark}")
    whole = sum(v.whole for _, v in found)
    wrong = sum(not v.allowed for _, v in found)
    need = min(MIN_WHOLE, len(found))
    print(f"{whole} of {len(found)} agree whole (at least {need}), {wrong} differences beyond the rule (0)")
    return 0 if whole >= need and not wrong else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", type=int, default=48, help="tokens per prompt")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), choices=range(1, len(PROMPTS) + 1), metavar="N")
    parser.add_argument("--threads", type=int, default=1, help="llama.cpp's threads; beyond the free cores it crawls")
    options = parser.parse_args()
    if importlib.util.find_spec("xllamacpp") is None:
        print("llama.cpp is not here to compare with: pip install xllamacpp", file=sys.stderr)
        return 2
    try:
        where = locate("smollm2")
        with mlxrt.load(str(where.path)) as engine:
            return report(answers(engine, str(where.path), options.n, options.prompts, options.threads), options.n)
    except mlxrt.MlxrtError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
