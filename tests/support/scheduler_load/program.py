"""A random load as plain data, made from one number: what arrives when, how it is asked for, when it is given up."""

import random
from dataclasses import dataclass, replace

from mlxrt import Request, SamplingParams
from tests.support.state_machine.checker import MOODS
from tests.support.state_machine.kinds import OVERFLOW, is_poisoned, stems


@dataclass(frozen=True)
class Arrival:
    at: int  # step
    request: Request
    cancel: int | None  # step at which its reader leaves
    by_id: bool  # it is cancelled by its number, so that its reader gets a last event


@dataclass(frozen=True)
class Program:
    seed: int
    kind: str
    chunk: int
    running: int
    ahead: int
    capacity: int  # tokens that fit, all together
    stall: int | None
    compiled: bool
    reuse: bool  # with a prefix cache
    alone: bool  # deterministic
    arrivals: tuple[Arrival, ...]

    def __str__(self) -> str:
        head = (
            f"program {self.seed}: {self.kind}, chunk {self.chunk}, {self.running} run, ahead {self.ahead}, "
            f"{self.capacity} tokens fit, stall {self.stall}, compiled {self.compiled}, reuse {self.reuse}, "
            f"alone {self.alone}"
        )
        lines = [
            f"  step {a.at}: {len(a.request.tokens or ())} tokens {list(a.request.tokens or ())}, {a.request.params}, "
            f"priority {a.request.priority}, deadline {a.request.deadline_s}, callback {bool(a.request.on_logits)}, "
            f"cancel {a.cancel} (by id: {a.by_id})"
            for a in self.arrivals
        ]
        return "\n".join([head, *lines])


def make(seed: int, kind: str) -> Program:
    chance = random.Random(f"{seed} {kind}")
    rate = chance.choice((0, 1, 3, 8))  # steps between two arrivals
    arrivals: list[Arrival] = []
    at = 0
    for _ in range(chance.randint(2, 9)):
        at += chance.randint(0, rate)
        arrivals.append(arrival(chance, at))
    if is_poisoned(kind):
        arrivals = [overflow(chance, a) if chance.random() < 0.3 else a for a in arrivals]
    return Program(
        seed=seed,
        kind=kind,
        chunk=chance.choice((1, 5, 16, 64, chance.randint(1, 64))),
        running=chance.randint(1, 6),
        ahead=chance.choice((0, 1, 1, 2, 3)),
        capacity=chance.choice((72, 96, 144, 300, 1200)),
        stall=chance.choice((None, None, 1, 3, 8, 20)),
        compiled=chance.random() < 0.06,
        reuse=chance.random() < 0.85,
        arrivals=tuple(arrivals),
        alone=chance.random() < 0.12,
    )


def arrival(chance: random.Random, at: int) -> Arrival:
    params = dict(MOODS[chance.randrange(len(MOODS))], max_tokens=chance.randint(1, 24), seed=chance.randrange(1 << 32))
    request = Request(
        tokens=prompt(chance),
        params=SamplingParams(**params),
        priority=chance.choice((0, 0, 0, 1, 2, -1)),
        deadline_s=chance.choice((None,) * 7 + (float(chance.randint(1, 60)),)),
        on_logits=(lambda row: None) if chance.random() < 0.12 else None,
    )
    cancel = at + chance.randint(0, 30) if chance.random() < 0.2 else None
    return Arrival(at, request, cancel, chance.random() < 0.5)


def overflow(chance: random.Random, arrival: Arrival) -> Arrival:
    """Somewhere in its prompt, often at the end, is the token that overflows."""
    tokens = arrival.request.tokens or ()
    at = chance.choice((len(tokens), chance.randint(0, len(tokens))))
    return replace(arrival, request=replace(arrival.request, tokens=(*tokens[:at], OVERFLOW, *tokens[at:])))


def prompt(chance: random.Random) -> tuple[int, ...]:
    """Often the beginning of one of a few texts, and something of its own: prefixes are to be shared."""
    stem = chance.choice(stems())
    head = stem[: chance.choice((len(stem), len(stem), chance.randint(0, len(stem))))]
    own = tuple(60 + chance.randrange(4) for _ in range(chance.choice((0, 1, 2, 6, chance.randint(0, 30)))))
    return (*head, *own) or (7,)
