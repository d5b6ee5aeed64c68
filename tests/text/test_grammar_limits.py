"""Grammars that are too deep are refused; those just below compile and give masks in any thread."""

import json
import threading

import numpy as np
import pytest

from mlxrt import BadRequest
from mlxrt.text.grammar import GrammarCompiler
from mlxrt.text.grammar_limits import MAX_REFERRED_DEPTH, MAX_RULES, measure_referred_depth
from mlxrt.text.response_format import ResponseFormat
from tests.support.ascii_tokenizer import write_ascii_tokenizer


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    tokenizer = write_ascii_tokenizer(tmp_path_factory.mktemp("ascii"))
    return GrammarCompiler(tokenizer, tokenizer.vocab_size, frozenset({0}))


def chain_schemas(n: int, nested: int) -> dict:
    """Definitions that each refer to the next, from inside of so many objects."""

    def nest(schema: dict) -> dict:
        for _ in range(nested):
            schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
        return schema

    definitions = {f"d{i}": nest({"$ref": f"#/$defs/d{i + 1}"}) for i in range(n)}
    return {"$ref": "#/$defs/d0", "$defs": definitions | {f"d{n}": {"type": "integer"}}}


def chain_rules(n: int, nested: int) -> str:
    rules = (f"r{i}: {'(' * nested} /a/ r{i + 1} {')' * nested}" for i in range(n))
    return "\n".join(("start: r0", *rules, f'r{n}: "x"'))


def schema_form(schema: dict) -> dict:
    return {"type": "json_schema", "schema": schema}


def grammar_form(text: str) -> dict:
    return {"type": "grammar", "grammar": text}


@pytest.mark.parametrize(
    "form",
    [
        schema_form(chain_schemas(20_000, 0)),
        schema_form(chain_schemas(4_000, 1)),
        schema_form(chain_schemas(150, 35)),
        grammar_form(chain_rules(20_000, 0)),
        grammar_form(chain_rules(3_000, 1)),
        grammar_form("start: %json " + json.dumps(chain_schemas(4_000, 1))),
        grammar_form('start: "%json {" a\na: %json ' + json.dumps(chain_schemas(4_000, 1))),
        grammar_form("root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1}" for i in range(5_000)) + '\nr5000 ::= "x"'),
    ],
    ids=["references", "objects", "deep objects", "rules", "nested rules", "inside lark", "after a string", "gbnf"],
)
def test_too_deep_is_refused(compiler, form):
    """The compiler recurses: chains of references and of nested rules overflowed its stack."""
    with pytest.raises(BadRequest, match=r"levels|rules"):
        compiler.matcher(ResponseFormat.parse(form))


@pytest.mark.parametrize(
    "form",
    [
        schema_form(chain_schemas(MAX_REFERRED_DEPTH // 4 - 3, 1)),
        schema_form(chain_schemas(80, 55)),
        grammar_form(chain_rules(MAX_RULES - 2, 0)),
        grammar_form(chain_rules(MAX_RULES - 2, 25)),
    ],
    ids=["objects", "deep objects", "rules", "nested rules"],
)
def test_almost_too_deep_is_held(compiler, form):
    matcher, failed = compiler.matcher(ResponseFormat.parse(form)), []

    def walk() -> None:
        row = np.empty(4, np.uint32)
        for _ in range(40):
            matcher.fill_mask(row)
            allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
            failed.append(not len(allowed))
            matcher.advance(int(allowed[-1]))

    thread = threading.Thread(target=walk)  # of the usual size
    thread.start()
    thread.join()
    assert failed == [False] * 40


def test_referred_depth():
    assert measure_referred_depth({"type": "integer"}) == 2
    assert measure_referred_depth(chain_schemas(1, 0)) == 4 + 2 + 2
    assert measure_referred_depth({"$ref": "#"}) == 2 + 2 and measure_referred_depth({"$ref": "other.json"}) == 2 + 128
    assert threading.stack_size() == 0
