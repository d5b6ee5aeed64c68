"""python -m tests.long.structured_output --schemas FOLDER [--part 0/4] | --patterns [--model smollm2]

Answers of a real model, drawn at temperature 1, held to a form: each that ends is checked by somebody else's code
(jsonschema, re, lark). FOLDER has files {"schema": ..., "tests": [{"data": ..., "valid": ...}]}, as MaskBench has them:
their instances are put to the matcher too. With --patterns: 60 regexes and 40 grammars. Exit code 1 on a wrong answer.
"""

import argparse
import json
import re
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np

import mlxrt
from mlxrt import BadRequest, Engine, EngineConfig, Request, SamplingParams
from mlxrt.engine.request import Finish
from mlxrt.text.grammar import GrammarCompiler
from mlxrt.text.response_format import ResponseFormat

from ..support import answer_forms

QUESTION = "Write one short example, as JSON of this schema: "
MOST = 1500  # characters of the schema in the prompt


class FormChecker:
    """Says whether a form's matcher takes a text."""

    def __init__(self, engine: Engine):
        self._tokenizer, self._size = engine.tokenizer, engine.vocab_size
        self._end = min(engine.tokenizer.eos_ids)
        self._compiler = GrammarCompiler(engine.tokenizer, self._size, frozenset(engine.tokenizer.eos_ids))

    def accepts(self, form: dict, text: str) -> bool:
        """The text, then the end."""
        parsed = ResponseFormat.parse(form)
        assert parsed is not None
        matcher = self._compiler.matcher(parsed)
        row = np.empty(-(-self._size // 32), np.uint32)
        tokens = [*self._tokenizer.encode(text, special=False), self._end]
        for i, token in enumerate(tokens):
            matcher.fill_mask(row)
            if not row[token // 32] >> np.uint32(token % 32) & 1:
                return False
            if matcher.advance(token):
                return i >= len(tokens) - 2
        return True


def check_instances(checker: FormChecker, name: str, form: dict, tests: list[dict], tally: Counter) -> None:
    """The file's own instances. Keys come in the schema's order: that of an instance is not of its meaning."""
    for test in tests:
        text = json.dumps(order_keys(test["data"], form["schema"], form["schema"]), ensure_ascii=False)
        tally["instances"] += 1
        if checker.accepts(form, text) != test["valid"]:
            tally["instances judged wrongly"] += 1
            print(f"{name}: instance {text[:200]} is {'valid' if test['valid'] else 'invalid'}")


def order_keys(value, schema, root):
    """An instance with its keys in the order of the schema's properties, as deep as properties and items go."""
    if isinstance(schema, dict) and isinstance(schema.get("$ref"), str) and schema["$ref"].startswith("#/"):
        target = root
        for part in schema["$ref"][2:].split("/"):
            target = target[part.replace("~1", "/").replace("~0", "~")]
        schema = target
    schema = schema if isinstance(schema, dict) else {}
    if isinstance(value, list):
        return [order_keys(one, schema.get("items"), root) for one in value]
    if not isinstance(value, dict):
        return value
    properties = schema.get("properties") or {}
    first = [key for key in properties if key in value]
    return {k: order_keys(value[k], properties.get(k), root) for k in (*first, *(k for k in value if k not in first))}


def run_schemas(engine: Engine, files: list[Path], tally: Counter, most: int) -> None:
    import jsonschema

    asked: list[tuple[str, dict, Request]] = []
    checker = FormChecker(engine)
    for i, path in enumerate(files):
        data = json.loads(path.read_text())
        form = {"type": "json_schema", "schema": data["schema"]}
        params = SamplingParams(max_tokens=most, temperature=1.0, seed=i)
        request = Request(
            messages=({"role": "user", "content": QUESTION + json.dumps(data["schema"])[:MOST]},),
            response_format=form,
            params=params,
        )
        try:
            engine.compile_grammar(request)
        except BadRequest as error:
            tally["refused"] += 1
            print(f"{path.stem} refused: {str(error)[:150]}")
            continue
        check_instances(checker, path.stem, form, data["tests"], tally)
        asked.append((path.stem, data["schema"], request))
    for (name, schema, _), done in zip(asked, engine.generate([request for *_, request in asked])):
        tally[f"ended by {done.finish_reason}"] += 1
        if done.finish_reason is not Finish.STOP:
            print(f"{name} ended by {done.finish_reason}: ... {done.text[-80:]!r}")
            continue
        try:
            validator = jsonschema.validators.validator_for(schema)
            validator(schema, format_checker=validator.FORMAT_CHECKER).validate(json.loads(done.text))
        except (ValueError, jsonschema.ValidationError) as error:
            tally["answers not of their form"] += 1
            print(f"{name}: {done.text[:300]!r}: {str(error)[:200]}")


def run_patterns(engine: Engine, tally: Counter, most: int) -> None:
    forms = [({"type": "regex", "pattern": p}, re.compile(p).fullmatch, p) for p in answer_forms.REGEXES]
    forms += [
        ({"type": "grammar", "grammar": g}, answer_forms.parses_as(twin or g), g) for g, twin in answer_forms.GRAMMARS
    ]
    asked = [
        Request(
            messages=({"role": "user", "content": "Write something short."},),
            response_format=form,
            params=SamplingParams(max_tokens=most, temperature=1.0, seed=i),
        )
        for i, (form, *_) in enumerate(forms)
    ]
    for (form, fits, source), done in zip(forms, engine.generate(asked)):
        tally[f"{form['type']} ended by {done.finish_reason}"] += 1
        if done.finish_reason is Finish.STOP and not fits(done.text):
            tally["answers not of their form"] += 1
            print(f"{source!r}: {done.text[:300]!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=Path)
    parser.add_argument("--patterns", action="store_true")
    parser.add_argument("--part", default="0/1", help="of the files: the first of four is 0/4")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--max-tokens", type=int, default=512)
    args = parser.parse_args()
    tally: Counter = Counter()
    began = time.monotonic()
    with mlxrt.load(args.model, EngineConfig(dtype="float32", max_running=64)) as engine:
        if args.schemas:
            at, of = map(int, args.part.split("/"))
            files = [p for p in sorted(args.schemas.glob("*.json")) if "schema" in json.loads(p.read_text())]
            run_schemas(engine, files[at::of], tally, args.max_tokens)
        if args.patterns:
            run_patterns(engine, tally, args.max_tokens)
    for name, count in sorted(tally.items()):
        print(f"{count:6} {name}")
    print(f"{time.monotonic() - began:.0f} s")
    sys.exit(bool(tally["answers not of their form"] or tally["instances judged wrongly"]))


if __name__ == "__main__":
    main()
