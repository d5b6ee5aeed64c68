"""Programs of requests: many lengths, greedy and random, that arrive, end and are cancelled at any time."""

import random

from mlxrt import Request, SamplingParams


def make_program(seed, vocab):
    """[(events of the others before it arrives, tokens read before it is cancelled or None, request)]."""
    generator = random.Random(seed)
    shared = [generator.randrange(vocab) for _ in range(generator.choice((1, 40, 64, 500)))]
    program = []
    for i in range(generator.choice((1, 1, 2, 3, 5, 9))):
        own = [generator.randrange(vocab) for _ in range(generator.randrange(1, 90))]
        n = generator.choice((1, 5, 33, 70, 150))
        hot = generator.random() < 0.15
        params = SamplingParams(max_tokens=n, ignore_eos=True, temperature=0.8 if hot else 0.0, seed=seed + i)
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
