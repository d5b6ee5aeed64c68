"""Programs of requests: many lengths, greedy and drawn, that arrive, end and are cancelled at any time."""

import random

from mlxrt import Request, SamplingParams

DRAWN: list[dict] = [
    {"temperature": 0.8},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.0, "top_k": 64, "min_p": 0.05},
    {"repetition_penalty": 1.2},
    {"temperature": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"temperature": 0.7, "top_p": 0.9, "logit_bias": {3: 2.0}, "suppress": (5,), "logprobs": 3},
]


def make_program(seed, vocab):
    """[(events of the others before it arrives, tokens read before it is cancelled or None, request)]."""
    generator = random.Random(seed)
    shared = [generator.randrange(vocab) for _ in range(generator.choice((1, 40, 64, 500)))]
    program = []
    for i in range(generator.choice((1, 1, 2, 3, 5, 9))):
        own = [generator.randrange(vocab) for _ in range(generator.randrange(1, 90))]
        n = generator.choice((1, 5, 33, 70, 150))
        drawn = generator.choice(DRAWN) if generator.random() < 0.4 else {}
        params = SamplingParams(max_tokens=n, ignore_eos=True, seed=seed + i, **drawn)
        cancel_after = generator.randrange(1, n + 1) if generator.random() < 0.2 else None
        request = Request(tokens=tuple(shared + own), params=params)
        program.append((generator.choice((0, 0, 7, 40)), cancel_after, request))
    return program


def run_program(engine, program):
    """The tokens of every request. Streams are read in turn, one event each."""
    waiting, open_streams, answers = list(enumerate(program)), {}, {i: [] for i in range(len(program))}
    events = 0
    while waiting or open_streams:
        while waiting and (events >= waiting[0][1][0] or not open_streams):
            i, (_, cancel_after, request) = waiting.pop(0)
            open_streams[i] = engine.stream([request]), cancel_after
        for i, (stream, cancel_after) in list(open_streams.items()):
            events += 1
            event = next(stream, None)
            if event is not None:
                answers[i].append(event.token)
            if event is None or len(answers[i]) == cancel_after:
                stream.close()
                del open_streams[i]
    return list(answers.values())
