"""Character classes mean what they mean in Python, in regexes, Lark grammars and JSON schemas."""

import random
import re
import warnings

import numpy as np
import pytest

from mlxrt.errors import BadRequest
from mlxrt.text.grammar import GrammarCompiler
from mlxrt.text.regex_dialect import convert_lark, convert_pattern, convert_schema
from mlxrt.text.response_format import ResponseFormat
from tests.support.ascii_tokenizer import write_ascii_tokenizer

PIECES = "[ [ ] ] - - -- & && ~ ~~ ^ a b-f \\] \\[ \\- \\w ( + . { # /".split()


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    tokenizer = write_ascii_tokenizer(tmp_path_factory.mktemp("ascii"))
    return GrammarCompiler(tokenizer, tokenizer.vocab_size, frozenset({0}))


def first_characters(compiler: GrammarCompiler, form: dict) -> set[str]:
    row = np.zeros(4, np.uint32)
    parsed = ResponseFormat.parse(form)
    assert parsed is not None
    compiler.matcher(parsed).fill_mask(row)
    return {chr(i + 30) for i in range(2, 97) if row[i // 32] >> np.uint32(i % 32) & 1}


def make_class(rng: random.Random) -> str | None:
    """A class that Python takes, with a character that it matches."""
    text = f"[{rng.choice(('', '^'))}{''.join(rng.choices(PIECES, k=rng.randint(1, 5)))}]"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "possible set difference": that is the point
            one = re.compile(text)
    except re.error:
        return None
    alone = one.fullmatch("") is None and all(
        one.match(chr(c)) is None or one.fullmatch(chr(c)) for c in range(32, 127)
    )
    return text if alone and any(one.fullmatch(chr(c)) for c in range(32, 127)) else None


SPACED = ["a{ 3}", "a{3 }", "ab{1, 2}c", "a{ 00000}", "{ 3}", "a{2 ,}", "a{ , }"]


@pytest.mark.parametrize("pattern", SPACED)
def test_repetitions_with_spaces_are_characters_as_in_python(compiler, pattern):
    assert re.fullmatch(pattern, pattern)
    assert convert_pattern(pattern) == pattern.replace("{", r"\{")
    assert first_characters(compiler, {"type": "regex", "pattern": f"{pattern}|~"}) == {pattern[0], "~"}
    lark = {"type": "grammar", "grammar": f"start: /{pattern}/"}
    assert first_characters(compiler, lark) == {pattern[0]}


@pytest.mark.parametrize("pattern", ["a?+", "a*+b", "a++", "x[ab]{2}+", "a**", "a{2}{3}", "a+?+", "a???", "(?:a)*+"])
def test_quantifiers_of_quantifiers_are_refused(compiler, pattern):
    """Rust repeats again, Python gives nothing back, ECMAScript has no such regex."""
    schema = {"type": "object", "properties": {"a": {"pattern": pattern}}}
    forms = [{"type": "regex", "pattern": pattern}, {"type": "grammar", "grammar": f"start: /{pattern}/"}]
    for form in (*forms, {"type": "json_schema", "schema": schema}):
        with pytest.raises(BadRequest, match="group what is repeated again"):
            first_characters(compiler, form)


@pytest.mark.parametrize(
    "pattern",
    ["a+?", "a{2,}?", "a??b", "(?:a?)+", r"\(?x", r"\++", "[+*]+", "(?i)a+", "((?:a)*)?", r"a\?+", "a{2", "{3}"],
)
def test_other_quantifiers_stay(pattern):
    assert convert_pattern(pattern) == pattern


def test_classes_mean_what_they_mean_in_python(compiler):
    rng, seen = random.Random(1), 0
    while seen < 150:
        text = make_class(rng)
        if text is None:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            want = {chr(c) for c in range(32, 127) if re.fullmatch(text, chr(c))}
        form = {"type": "grammar", "grammar": f"start: /{text.replace('/', chr(92) + '/')}/"}
        assert first_characters(compiler, {"type": "regex", "pattern": text}) == want, text
        assert first_characters(compiler, form) == want, text
        seen += 1


def test_patterns_of_schemas(compiler):
    """`[^[]` is ordinary ECMAScript."""
    form = {"type": "json_schema", "schema": {"type": "string", "pattern": "^[^[\\]]{2}$"}}
    assert first_characters(compiler, form) == {'"'}
    schema = {
        "properties": {"pattern": {"pattern": "[[]"}, "x": {"const": {"pattern": "[[]"}}},
        "patternProperties": {"^[a&&b]": {"anyOf": [{"pattern": "[~~]"}]}},
        "enum": ["[[]"],
    }
    assert convert_schema(schema) == {
        "properties": {"pattern": {"pattern": r"[\[]"}, "x": {"const": {"pattern": "[[]"}}},
        "patternProperties": {r"^[a\&\&b]": {"anyOf": [{"pattern": r"[\~\~]"}]}},
        "enum": ["[[]"],
    }


@pytest.mark.parametrize("text", ["a[b-d]+", "[[:alpha:]]", r"\[[^\]]", "[^a-z]", "x", "", "[a", "\\"])
def test_what_stays(text):
    assert convert_pattern(text) == text


def test_only_the_regexes_of_a_grammar_change():
    text = 'start: "[[" /[[]/ a // [[]/x[[]/\na: /b\\/[&&]/ %json {"pattern": "/[[]/"}'
    assert convert_lark(text) == 'start: "[[" /[\\[]/ a // [[]/x[[]/\na: /b\\/[\\&\\&]/ %json {"pattern": "/[[]/"}'
