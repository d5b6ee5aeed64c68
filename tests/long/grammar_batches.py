"""python -m tests.long.grammar_batches [--batches 100] [--seed 0]: batches of 8 forms against runs alone.

Random rows on tiny models of every cache kind: schemas, regexes, grammars, choices and none, greedy and drawn, with
penalties, stop strings and log probabilities. The tokens, the texts and the ends must be those of the same request
alone, and what ends by itself must be of its form, by somebody else's code. Exit code 1 on a difference.
"""

import argparse
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

from mlxrt import Engine, EngineConfig, GrammarFailed, Request, SamplingParams
from mlxrt.engine import Source
from mlxrt.engine.request import Finish

from ..support.answer_forms import GRAMMARS, REGEXES
from ..support.ascii_tokenizer import write_ascii_tokenizer
from ..support.odd_formats import BASE_SCHEMAS
from ..support.toy_models import KINDS
from .mutate_formats import is_of_form

CACHES = ("full", "window", "hybrid", "q8")
ROWS = 8


def make_form(rng: random.Random) -> dict | None:
    kind = rng.choice(("schema", "schema", "regex", "grammar", "choice", "object", "none"))
    if kind == "schema":
        return {"type": "json_schema", "schema": rng.choice(BASE_SCHEMAS)}
    if kind == "regex":
        return {"type": "regex", "pattern": rng.choice([p for p in REGEXES if p.isascii() and "\\u" not in p])}
    if kind == "grammar":
        return {"type": "grammar", "grammar": rng.choice(GRAMMARS)[0]}
    if kind == "choice":
        return {"type": "choice", "choices": rng.sample(["yes", "yesterday", "no (really)", "a|b", "7"], 3)}
    return {"type": "json_object"} if kind == "object" else None


def make_request(rng: random.Random) -> tuple[dict | None, Request]:
    drawn = {"temperature": rng.choice((0.7, 1.0, 1.5)), "seed": rng.randrange(10**6)} if rng.random() < 0.7 else {}
    drawn |= {"top_k": rng.choice((0, 5)), "top_p": rng.choice((1.0, 0.9))} if drawn else {}
    params = SamplingParams(
        max_tokens=rng.randint(5, 80),
        repetition_penalty=rng.choice((1.0, 1.0, 1.2)),
        stop=(rng.choice("ab1]"),) if rng.random() < 0.15 else (),
        logprobs=rng.choice((0, 0, 2)),
        **drawn,
    )
    prompt = rng.choice(("answer:", "answer: ", "once upon a time ")) * rng.randint(1, 6)
    form = make_form(rng)
    return form, Request(prompt=prompt, response_format=form, params=params)


def run(batches: int, seed: int) -> tuple[Counter, int]:
    rng, tally, wrong = random.Random(seed), Counter(), 0
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = write_ascii_tokenizer(Path(folder))

        def make_engine(kind: str, **config) -> Engine:
            return Engine(KINDS[kind](), EngineConfig(**config), tokenizer, Source(eos=frozenset({0})))

        for kind in CACHES:
            with make_engine(kind, prefix_cache=False, max_running=1) as lone, make_engine(kind) as engine:
                for _ in range(batches // len(CACHES)):
                    asked, alone = [], []
                    while len(asked) < ROWS:
                        form, request = make_request(rng)
                        try:
                            alone.append(lone.generate(request))
                        except GrammarFailed:  # a form that needs a character which the tiny vocabulary has not
                            tally["forms beyond the vocabulary"] += 1
                        else:
                            asked.append((form, request))
                    together = engine.generate([request for _, request in asked])
                    for (form, request), want, got in zip(asked, alone, together):
                        same = (got.tokens, got.text, got.finish_reason) == (want.tokens, want.text, want.finish_reason)
                        ended = got.finish_reason is Finish.STOP and not request.params.stop and form is not None
                        if not same or (ended and is_of_form(form, got.text) is False):
                            wrong += 1
                            print(f"{kind}, {request}: {got.text!r} beside others, {want.text!r} alone", flush=True)
                        tally["tokens"] += len(got.tokens)
                        tally[f"{'free' if form is None else form['type']} ended by {got.finish_reason}"] += 1
    return tally, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tally, wrong = run(args.batches, args.seed)
    for name, n in sorted(tally.items()):
        print(f"{n:6} {name}")
    print(f"{wrong} rows differ or are not of their form")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
