"""Prefix cache: the first token when most of the prompt was computed before.

Three ways back: a second turn (the old prompt goes on), an edited tail (its last eighth is other text), a restart (the
KV cache comes from disk). Every engine does it as well as it can; the same prompt without a cache shows what was saved,
and must give the same answer.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from ..comparison import WALL, Comparison, Options
from ..interleave import Reply, Rounds
from ..result import OURS, Figure
from . import Case

ANSWER = 4  # tokens compared
QUESTION = 16  # tokens of the new turn


def cases(options: Options) -> list[Case]:
    ways = {"second turn": second_turn, "edited tail": edited_tail, "restart": second_turn}
    return [Case("prefix", name, partial(run, name=name, prompts=way), weight=2.0) for name, way in ways.items()]


def second_turn(comparison: Comparison, n: int, r: int) -> tuple[list[int], list[int]]:
    """The first prompt and the second."""
    history = comparison.prompts(n, 3 * r + 40)
    return history, [*history, *comparison.prompts(QUESTION, 3 * r + 41)]


def edited_tail(comparison: Comparison, n: int, r: int) -> tuple[list[int], list[int]]:
    history = comparison.prompts(n, 3 * r + 40)
    kept = n - n // 8
    return history, [*history[:kept], *comparison.prompts(n - kept + QUESTION, 3 * r + 42)]


def run(comparison: Comparison, name: str, prompts: Any) -> Iterator[Figure]:
    lengths = comparison.options.lengths
    n = min(lengths[len(lengths) // 2], comparison.context - QUESTION - ANSWER - 1)
    engines = {peer: peer for peer in comparison.backends}
    clock = WALL if name == "restart" else comparison.clock  # waiting for a disk takes no CPU time

    def first_token(reply: Reply) -> float:
        return reply[clock][0]

    if name == "restart":
        engines = {peer: peer for peer in engines if peer in (OURS, "mlx-lm")}
        if comparison.model.resolved.path is None:
            return  # random weights are identified by hashing all their bytes, which would be measured

    def questions(engine: str, r: int) -> list[dict[str, Any]]:
        before, now = prompts(comparison, 32 if r < 0 and comparison.on_cpu else n, r + 1)
        cold = {"do": "generate", "prompt": now, "max_tokens": ANSWER, "fresh": True}
        if name == "restart":
            return [cold, {"do": "restart", "history": before, "prompt": now, "max_tokens": ANSWER}]
        first = {"do": "generate", "prompt": before, "max_tokens": ANSWER, "fresh": True}
        return [cold, first, cold | {"fresh": False}]

    rounds = comparison.run(f"prefix, {name}", questions, [first_token], engines=engines)
    check_reuse(comparison, rounds, questions)
    colds = {e: [first_token(reply["before"][0]) for reply in replies] for e, replies in rounds.replies.items()}
    cached = {e: replies[-1]["cached"] for e, replies in rounds.replies.items()}
    values = rounds.values(first_token)
    notes = tuple(
        f"{e}: {cached[e]} of {n + QUESTION} tokens reused, {median_ratio(values[e], cold):.1%} of cold"
        for e, cold in colds.items()
    )
    agreement = rounds.agreement.to_dict()
    yield comparison.figure(
        "prefix", f"{name}, {n}", "first token", "s", values, higher=False, agreement=agreement, notes=notes
    )
    yield comparison.figure("prefix", f"{name}, {n}", "first token cold", "s", colds, higher=False)


def median_ratio(warm: list[float], cold: list[float]) -> float:
    return sorted(w / c for w, c in zip(warm, cold))[len(warm) // 2]


def check_reuse(comparison: Comparison, rounds: Rounds, questions: Any) -> None:
    """A cached prefix must not change the answer."""
    for r, reply in enumerate(rounds.replies[OURS]):
        prompt = questions(OURS, r)[-1]["prompt"]
        cold = reply["before"][0]["tokens"]
        tie = comparison.tie(OURS)
        rounds.agreement.compare("mlxrt, reused", prompt, cold, reply["tokens"], tie, comparison.logit_gap)
