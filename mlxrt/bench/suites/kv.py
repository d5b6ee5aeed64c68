"""Kinds of keys and values: what they save, what they cost in speed, what they do to the logits."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from ..contest import Contest, Options
from ..result import OURS, Figure
from . import Case, decode

KINDS = ("q8", "q4", "k8v4")
PEER_BITS = {"8 bit": 8, "4 bit": 4}


def cases(options: Options) -> list[Case]:
    lengths = options.lengths
    return [Case("kv", f"after {lengths[len(lengths) // 2]}", partial(run, n=lengths[len(lengths) // 2]), weight=3.0)]


def contenders(contest: Contest) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
    """Players, and how each is configured: one process serves all kinds of an engine."""
    players = {OURS: OURS}
    configs: dict[str, dict[str, Any]] = {OURS: {}}
    for kind in KINDS:
        players[f"mlxrt {kind}"], configs[f"mlxrt {kind}"] = OURS, {"kv": kind}
    if "mlx-lm" in contest.sides:
        players["mlx-lm"], configs["mlx-lm"] = "mlx-lm", {}
        for name, bits in PEER_BITS.items():
            players[f"mlx-lm {name}"], configs[f"mlx-lm {name}"] = "mlx-lm", {"kv_bits": bits}
    return players, configs


def run(contest: Contest, n: int) -> Iterator[Figure]:
    n = min(n, contest.context - contest.options.decoded - 1)
    prompt = contest.prompts(n, 1)
    players, configs = contenders(contest)
    asked = {"do": "generate", "prompt": prompt, "max_tokens": contest.options.decoded + 1, "fresh": False}
    short = asked | {"max_tokens": 3} if contest.on_cpu else asked
    speed = partial(decode.rate, contest)
    rounds = contest.alternate(
        "kv",
        lambda name, r: [(short if r < 0 else asked) | {"config": configs[name]}],
        [speed],
        players=players,
        judged=False,
    )
    yield contest.figure("kv", f"after {n}", "decode", "tok/s", rounds.values(speed), at={"context": n})
    kept = {}
    for name in rounds.replies:
        reply = contest.sides[players[name]].ask(**asked | {"config": configs[name], "fresh": True, "max_tokens": 2})
        kept[name] = [reply["kv"] / (n + 1)]
    yield contest.figure("kv", f"after {n}", "memory", "bytes/token", kept, higher=False)
    yield from errors(contest, prompt, n)


def errors(contest: Contest, prompt: list[int], n: int) -> Iterator[Figure]:
    served = [kind for kind in KINDS if f"mlxrt {kind}" not in contest.refused]
    found = {kind: contest.ours.ask(do="logit_error", prompt=prompt, config={"kv": kind}) for kind in served}
    for key, what, unit in (
        ("kl", "divergence from full", "nats"),
        ("same_best", "same likeliest token", "share"),
    ):
        values = {f"mlxrt {kind}": [error[key]] for kind, error in found.items()}
        yield contest.figure("kv", f"over {n}", what, unit, values, higher=key == "same_best")
