"""KV cache kinds: what they save, what they cost in speed, what they do to the logits."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from ..comparison import Comparison, Options
from ..result import OURS, Figure
from . import Case, decode

PEER_BITS = {"8 bit": 8, "4 bit": 4}


def cases(options: Options) -> list[Case]:
    n = options.lengths[len(options.lengths) // 2]
    return [Case("kv", f"after {n}", partial(run, n=n), weight=3.0)]


def engine_configs(comparison: Comparison) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
    """Engines with their backends and configurations: one backend serves all kinds of an engine."""
    engines = {OURS: OURS}
    configs: dict[str, dict[str, Any]] = {OURS: {}}
    for kind in comparison.options.kv:
        engines[f"mlxrt {kind}"], configs[f"mlxrt {kind}"] = OURS, {"kv": kind}
    if "mlx-lm" in comparison.backends:
        engines["mlx-lm"], configs["mlx-lm"] = "mlx-lm", {}
        for name, bits in PEER_BITS.items():
            engines[f"mlx-lm {name}"], configs[f"mlx-lm {name}"] = "mlx-lm", {"kv_bits": bits}
    return engines, configs


def run(comparison: Comparison, n: int) -> Iterator[Figure]:
    n = min(n, comparison.context - comparison.options.decoded - 1)
    prompt = comparison.prompts(n, 1)
    engines, configs = engine_configs(comparison)
    question = {"do": "generate", "prompt": prompt, "max_tokens": comparison.options.decoded + 1, "fresh": False}
    warmup = question | {"max_tokens": 3} if comparison.on_cpu else question
    speed = partial(decode.rate, comparison)
    rounds = comparison.run(
        "kv",
        lambda name, r: [(warmup if r < 0 else question) | {"config": configs[name]}],
        [speed],
        engines=engines,
        check=False,
    )
    yield comparison.figure("kv", f"after {n}", "decode", "tok/s", rounds.values(speed), at={"context": n})
    memory = {}
    for name in rounds.replies:
        backend = comparison.backends[engines[name]]
        reply = backend.ask(**question | {"config": configs[name], "fresh": True, "max_tokens": 2})
        memory[name] = [reply["kv"] / (n + 1)]
    yield comparison.figure("kv", f"after {n}", "memory", "bytes/token", memory, higher=False)
    yield from logit_errors(comparison, prompt, n)


def logit_errors(comparison: Comparison, prompt: list[int], n: int) -> Iterator[Figure]:
    served = [kind for kind in comparison.options.kv if f"mlxrt {kind}" not in comparison.refused]
    found = {kind: comparison.ours.ask(do="logit_error", prompt=prompt, config={"kv": kind}) for kind in served}
    for key, what, unit in (
        ("kl", "divergence from full", "nats"),
        ("same_best", "same likeliest token", "share"),
    ):
        values = {f"mlxrt {kind}": [error[key]] for kind, error in found.items()}
        yield comparison.figure("kv", f"over {n}", what, unit, values, higher=key == "same_best")
