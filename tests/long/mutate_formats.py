"""python -m tests.long.mutate_formats [--count 2000] [--seed 0] [--schemas FOLDER]: odd schemas, regexes and grammars.

Each is put into a request of one engine with a tiny model: it is refused with BadRequest, or answered, and an answer
that ends is of its form, by somebody else's code. Printed: how many of each, the longest time one took, the growth of
the process's memory. Exit code 1 where another error came up, an answer was wrong, one took longer than --seconds,
memory grew by more than --megabytes, or the engine did not answer a plain request in between.
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from mlxrt import BadRequest, Engine, EngineConfig, GrammarFailed, Request, SamplingParams
from mlxrt.engine import Source
from mlxrt.engine.request import Finish
from mlxrt.text.grammar import COMPILE_SECONDS

from ..support.answer_forms import GRAMMARS, REGEXES, parses_as
from ..support.ascii_tokenizer import write_ascii_tokenizer
from ..support.odd_formats import BASE_SCHEMAS, mutate_schema, mutate_text, odd_formats
from ..support.toy_models import KINDS

HARD_SHARE = 0.05  # of the mutated formats, made from those that take seconds to compile


def make_format(rng: random.Random, bases: list[dict], odd: list[dict]) -> dict:
    if odd and rng.random() < HARD_SHARE:
        return mutate_odd(rng.choice(odd), rng)
    kind = rng.choice(("schema", "schema", "regex", "grammar"))
    if kind == "schema":
        return {"type": "json_schema", "schema": mutate_schema(rng.choice(bases), rng)}
    if kind == "regex":
        return {"type": "regex", "pattern": mutate_text(rng.choice(REGEXES), rng)}
    return {"type": "grammar", "grammar": mutate_text(rng.choice(GRAMMARS)[0], rng)}


def mutate_odd(form: dict, rng: random.Random) -> dict:
    """A hard format, changed; one that is too deep for Python to copy as it is."""
    try:
        if form["type"] == "json_schema":
            return form | {"schema": mutate_schema(form["schema"], rng)}
    except RecursionError:
        return form
    key = {"regex": "pattern", "grammar": "grammar"}.get(form["type"])
    return form | {key: mutate_text(form[key], rng)} if key else form


def is_of_form(form: dict, text: str) -> bool | None:
    """By jsonschema, re or lark; None where they do not know the form."""
    import jsonschema

    try:
        if form["type"] == "json_schema":
            jsonschema.validate(json.loads(text), form["schema"])
        elif form["type"] == "regex":
            return matches(form["pattern"], text)
        elif form["type"] == "choice":
            return text in form["choices"]
        elif "::=" not in form["grammar"] and len(form["grammar"]) < 5000:  # lark takes minutes for more
            return parses_as(form["grammar"])(text)
        else:
            return None
    except (json.JSONDecodeError, jsonschema.ValidationError):
        return False
    except Exception:  # their limits, not ours: another dialect, too deep for them
        return None
    return True


def matches(pattern: str, text: str) -> bool | None:
    """In a process of its own: Python's own matching of a catastrophic pattern may take for ever."""
    program = "import re, sys; sys.exit(re.fullmatch(sys.argv[1], sys.argv[2]) is None)"
    try:
        done = subprocess.run([sys.executable, "-c", program, pattern, text], timeout=5, capture_output=True)
    except (subprocess.TimeoutExpired, ValueError):
        return None
    return {0: True, 1: False}[done.returncode] if not done.stderr else None


def show(form: dict) -> str:
    try:
        return json.dumps(form)[:300]
    except RecursionError:
        return f"a deep {form['type']}"


def peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Run:
    def __init__(self, engine: Engine, tally: Counter):
        self.engine, self.tally, self.longest, self.wrong = engine, tally, (0.0, ""), 0

    def ask(self, form: dict, seed: int) -> None:
        began = time.monotonic()
        try:
            request = Request(
                prompt="answer:",
                response_format=form,
                params=SamplingParams(max_tokens=48, temperature=1.0, seed=seed, top_k=40),
            )
            try:
                done = self.engine.generate(request)
            finally:
                self.longest = max(self.longest, (time.monotonic() - began, show(form)))
        except (BadRequest, GrammarFailed) as error:
            self.tally[f"{form['type']}: {type(error).__name__}"] += 1
        except BaseException as error:
            self.complain(form, f"raised {error!r:.300}")
        else:
            self.tally[f"{form['type']}: ended by {done.finish_reason}"] += 1
            if done.finish_reason is Finish.STOP and is_of_form(form, done.text) is False:
                self.complain(form, f"was answered with {done.text[:200]!r}")

    def complain(self, form: dict, what: str) -> None:
        self.wrong += 1
        print(f"{show(form)} {what}", flush=True)

    def check_alive(self) -> None:
        """The engine answers a request without a form as it did before."""
        self.wrong += len(self.engine.generate("hello", max_tokens=3).tokens) != 3


def run(count: int, seed: int, schemas: Path | None = None, hard: bool = True) -> tuple[Run, float]:
    """`hard`: with the formats that take seconds to compile, these first."""
    rng = random.Random(seed)
    bases = [json.loads(p.read_text()).get("schema") for p in sorted(schemas.glob("*.json"))] if schemas else []
    bases = [base for base in bases if base is not None] or list(BASE_SCHEMAS)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = write_ascii_tokenizer(Path(folder))
        with Engine(KINDS["full"](), EngineConfig(), tokenizer, Source(eos=frozenset({0}))) as engine:
            done = Run(engine, Counter())
            done.ask({"type": "choice", "choices": ["yes"]}, 0)  # builds the tokenizer
            before, odd = peak_megabytes(), odd_formats() if hard else []
            for i in range(count):
                done.ask(odd[i] if i < len(odd) else make_format(rng, bases, odd), i)
                if i % 100 == 0:
                    done.check_alive()
                    if hard:
                        print(f"{i} asked, longest {done.longest[0]:.2f} s, {done.wrong} wrong", flush=True)
            done.check_alive()
            return done, peak_megabytes() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--schemas", type=Path, help="a folder of schemas to mutate")
    parser.add_argument("--seconds", type=float, default=COMPILE_SECONDS + 5, help="the longest that one may take")
    parser.add_argument("--megabytes", type=float, default=2048)
    args = parser.parse_args()
    done, grown = run(args.count, args.seed, args.schemas)
    for name, n in sorted(done.tally.items()):
        print(f"{n:6} {name}")
    print(f"longest {done.longest[0]:.2f} s ({done.longest[1]}), memory grew by {grown:.0f} MB, {done.wrong} wrong")
    sys.exit(bool(done.wrong) or done.longest[0] > args.seconds or grown > args.megabytes)


if __name__ == "__main__":
    main()
