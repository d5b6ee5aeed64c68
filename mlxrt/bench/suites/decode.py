"""One sequence: decode and prefill by length, and decode by KV cache kind.

Decode times the tokens after a prompt: every engine prefills it once and keeps it, a round decodes a few tokens from
there, and the round's first token is not timed, since it belongs to the prompt. Prefill times from the call to the
first token of a prompt that no cache holds. KV cache kinds are measured by memory, speed and error of the logits.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from ..comparison import WALL, Comparison, Options
from ..interleave import Reply, Rounds
from ..result import OURS, Figure
from ..statistics import MIN_LEVEL, paired_ratio
from . import Case

MLX_LM_KINDS = {"8 bit": 8, "4 bit": 4}


def cases(options: Options) -> list[Case]:
    lengths, longest = options.lengths, max(options.lengths)
    middle = lengths[len(lengths) // 2]
    return [
        *(Case("decode", f"after {n}", partial(decode, n=n)) for n in lengths),
        *(Case("prefill", f"{n} tokens", partial(prefill, n=n), weight=1 + n / longest) for n in lengths),
        Case("kv", f"after {middle}", partial(kv_kinds, n=middle), weight=3.0),
    ]


def decode_rate(comparison: Comparison, reply: Reply) -> float:
    last = len(reply["at"]) - 1
    return last / comparison.seconds(reply, 0, last)


def sleep_notes(comparison: Comparison, rounds: Rounds) -> tuple[str, ...]:
    """CPU time does not see an engine that sleeps: note where wall time gives a significantly different ratio."""
    if comparison.clock == WALL:
        return ()
    wall = rounds.values(lambda reply: 1 / (reply[WALL][-1] - reply[WALL][0]))
    cpu = rounds.values(partial(decode_rate, comparison))
    notes = []
    for name in wall.keys() - {OURS}:
        n = min(len(wall[name]), len(wall[OURS]))
        by_wall = paired_ratio(wall[OURS][:n], wall[name][:n], 0.99, rounds.processes)
        by_cpu = paired_ratio(cpu[OURS][:n], cpu[name][:n], 0.99, rounds.processes)
        if by_wall.level > MIN_LEVEL and (by_cpu.high < by_wall.low or by_cpu.low > by_wall.high):
            notes.append(f"by the wall clock the ratio to {name} is {by_wall}: one of them waits for something")
    return tuple(notes)


def token_gaps(replies: list[Reply]) -> list[float]:
    """Milliseconds between tokens of all rounds."""
    return [1e3 * (b - a) for reply in replies for a, b in zip(reply["at"], reply["at"][1:])]


def decode_questions(comparison: Comparison, prompt: list[int]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The question of a round and of the warm-up, which prefills the prompt."""
    tokens = comparison.options.decoded + 1
    question = {"do": "generate", "prompt": prompt, "max_tokens": tokens, "fresh": False}
    return question, question | {"max_tokens": 3} if comparison.on_cpu else question


def decode(comparison: Comparison, n: int) -> Iterator[Figure]:
    n = min(n, comparison.context - comparison.options.decoded - 1)
    question, warmup = decode_questions(comparison, comparison.prompts(n, 0))
    speed = partial(decode_rate, comparison)
    rounds = comparison.run(f"decode after {n}", lambda name, r: [question if r >= 0 else warmup], [speed])
    cost, middle = comparison.model.cost, n + comparison.options.decoded / 2
    read = cost.bytes_at(int(middle))
    yield comparison.figure(
        "decode",
        f"after {n}",
        "decode",
        "tok/s",
        rounds.values(speed),
        roofline=comparison.device_peak["copy_bytes_per_s"] / read,
        at={"context": n, "flops": cost.flops_at(middle), "intensity": cost.flops_at(middle) / read},
        latencies={name: token_gaps(replies) for name, replies in rounds.replies.items()},
        agreement=rounds.agreement.to_dict(),
        notes=sleep_notes(comparison, rounds),
    )
    memory = {name: [r["peak"] / 1e6 for r in replies if "peak" in r] for name, replies in rounds.replies.items()}
    memory = {name: values for name, values in memory.items() if values}
    if OURS in memory:
        yield comparison.figure("decode", f"after {n}", "peak memory", "MB", memory, higher=False, at={"context": n})


def prefill(comparison: Comparison, n: int) -> Iterator[Figure]:
    n = min(n, comparison.context - 2)

    def questions(name: str, r: int) -> list[dict[str, Any]]:
        size = min(n, 16) if r < 0 and comparison.on_cpu else n
        return [{"do": "generate", "prompt": comparison.prompts(size, r + 2), "max_tokens": 1, "fresh": True}]

    def rate(reply: Reply) -> float:
        return n / comparison.seconds(reply, -1, 0)

    rounds = comparison.run(f"prefill {n}", questions, [rate])
    cost, dtype = comparison.model.cost, comparison.ours.info["dtype"]
    flops = cost.flops_at(n / 2)
    yield comparison.figure(
        "prefill",
        f"{n} tokens",
        "prefill",
        "tok/s",
        rounds.values(rate),
        roofline=comparison.device_peak[f"matmul_{dtype}_flops"] / flops,
        at={"context": n, "flops": flops, "intensity": n * flops / cost.bytes_read},
        latencies={name: [1e3 * r["at"][0] for r in replies] for name, replies in rounds.replies.items()},
        agreement=rounds.agreement.to_dict(),
    )


def engine_configs(comparison: Comparison) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
    """Engines with their backends and configurations: one backend serves all kinds of an engine."""
    engines = {OURS: OURS}
    configs: dict[str, dict[str, Any]] = {OURS: {}}
    for kind in comparison.options.kv:
        engines[f"mlxrt {kind}"], configs[f"mlxrt {kind}"] = OURS, {"kv": kind}
    if "mlx-lm" in comparison.backends:
        engines["mlx-lm"], configs["mlx-lm"] = "mlx-lm", {}
        for name, bits in MLX_LM_KINDS.items():
            engines[f"mlx-lm {name}"], configs[f"mlx-lm {name}"] = "mlx-lm", {"kv_bits": bits}
    return engines, configs


def kv_kinds(comparison: Comparison, n: int) -> Iterator[Figure]:
    n = min(n, comparison.context - comparison.options.decoded - 1)
    prompt = comparison.prompts(n, 1)
    engines, configs = engine_configs(comparison)
    question, warmup = decode_questions(comparison, prompt)
    speed = partial(decode_rate, comparison)

    def questions(name: str, r: int) -> list[dict[str, Any]]:
        return [(warmup if r < 0 else question) | {"config": configs[name]}]

    rounds = comparison.run("kv", questions, [speed], engines=engines, check=False)
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
    for key, what, unit in (("kl", "divergence from full", "nats"), ("same_best", "same likeliest token", "share")):
        values = {f"mlxrt {kind}": [error[key]] for kind, error in found.items()}
        yield comparison.figure("kv", f"over {n}", what, unit, values, higher=key == "same_best")
