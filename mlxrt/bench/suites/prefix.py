"""Prefix reuse: the first token when most of the prompt was computed before.

Three ways back: a second turn (the old prompt goes on), an edited tail (its last eighth is other text), a restart (what
was computed comes from disk). Every engine does it as well as it can; the same prompt cold is the measure of what was
saved, and its answer must be the same.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from ..contest import WALL, Contest, Options
from ..result import OURS, Figure
from ..turns import Reply, Rounds
from . import Case

ANSWER = 4  # tokens compared
QUESTION = 16  # tokens of the new turn


def cases(options: Options) -> list[Case]:
    ways = {"second turn": second_turn, "edited tail": edited_tail, "restart": restart}
    return [Case("prefix", name, partial(run, name=name, prompts=way), weight=2.0) for name, way in ways.items()]


def second_turn(contest: Contest, n: int, r: int) -> tuple[list[int], list[int]]:
    """What was asked first, and what is asked then."""
    history = contest.prompts(n, 3 * r + 40)
    return history, [*history, *contest.prompts(QUESTION, 3 * r + 41)]


def edited_tail(contest: Contest, n: int, r: int) -> tuple[list[int], list[int]]:
    history = contest.prompts(n, 3 * r + 40)
    kept = n - n // 8
    return history, [*history[:kept], *contest.prompts(n - kept + QUESTION, 3 * r + 42)]


restart = second_turn


def run(contest: Contest, name: str, prompts: Any) -> Iterator[Figure]:
    lengths = contest.options.lengths
    n = min(lengths[len(lengths) // 2], contest.context - QUESTION - ANSWER - 1)
    players = {peer: peer for peer in contest.sides}
    clock = WALL if name == "restart" else contest.clock  # waiting for a disk is no processor time

    def first_token(reply: Reply) -> float:
        return reply[clock][0]

    if name == "restart":
        players = {peer: peer for peer in players if peer in (OURS, "mlx-lm")}
        if contest.subject.located.path is None:
            return  # weights that are drawn have no digest but their own bytes': reading them would be measured

    def questions(side: str, r: int) -> list[dict[str, Any]]:
        before, now = prompts(contest, 32 if r < 0 and contest.on_cpu else n, r + 1)
        cold = {"do": "generate", "prompt": now, "max_tokens": ANSWER, "fresh": True}
        if name == "restart":
            return [cold, {"do": "restart", "history": before, "prompt": now, "max_tokens": ANSWER}]
        first = {"do": "generate", "prompt": before, "max_tokens": ANSWER, "fresh": True}
        return [cold, first, cold | {"fresh": False}]

    rounds = contest.alternate(f"prefix, {name}", questions, [first_token], players=players)
    check_reuse(contest, rounds, questions)
    colds = {side: [first_token(reply["before"][0]) for reply in replies] for side, replies in rounds.replies.items()}
    cached = {side: replies[-1]["cached"] for side, replies in rounds.replies.items()}
    values = rounds.values(first_token)
    notes = tuple(
        f"{side}: {cached[side]} of {n + QUESTION} tokens reused, {saved(values[side], cold):.1%} of cold"
        for side, cold in colds.items()
    )
    told = rounds.agreement.to_dict()
    yield contest.figure(
        "prefix", f"{name}, {n}", "first token", "s", values, higher=False, agreement=told, notes=notes
    )
    yield contest.figure("prefix", f"{name}, {n}", "first token cold", "s", colds, higher=False)


def saved(warm: list[float], cold: list[float]) -> float:
    """The warm share of the cold time, of the middle round."""
    return sorted(w / c for w, c in zip(warm, cold))[len(warm) // 2]


def check_reuse(contest: Contest, rounds: Rounds, questions: Any) -> None:
    """A reused prefix must not change the answer."""
    for r, reply in enumerate(rounds.replies[OURS]):
        prompt = questions(OURS, r)[-1]["prompt"]
        cold = reply["before"][0]["tokens"]
        rounds.agreement.compare("mlxrt, reused", prompt, cold, reply["tokens"], contest.tie(OURS), contest.gap)
