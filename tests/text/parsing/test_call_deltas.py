"""Calls as they are written: name and arguments come out before the call is complete."""

import pytest

from .cutting import Stream, check_deltas, read
from .formats import FORMATS

STREAMED = ("qwen3", "hermes_as_text", "llama3", "mistral_v13", "deepseek_v3", "deepseek_v31", "gpt_oss")


@pytest.mark.parametrize("name", STREAMED)
def test_arguments_come_as_they_are_written(name):
    family = FORMATS[name]
    tokens = (*family.special, *family.tokens)
    segments = read(Stream(family.weather, tokens, family.special, 3), family.form, tail=family.tail)
    deltas = [s.delta for s in segments if s.delta is not None]
    assert deltas[0].name == "get_weather" and deltas[0].complete is None
    assert len([d for d in deltas if d.arguments]) >= 2
    check_deltas(segments)


@pytest.mark.parametrize("name", STREAMED)
def test_a_call_that_is_cut_off_has_no_complete_one_and_its_text_is_not_lost(name):
    family = FORMATS[name]
    text = family.weather[: family.weather.index("Paris") + 3]
    segments = read(Stream(text, (*family.special, *family.tokens), family.special, 5), family.form, tail=family.tail)
    assert any(s.delta for s in segments) and not any(s.call for s in segments)
    assert "".join(s.raw for s in segments) == text
    assert "Par" in "".join(s.text for s in segments)


def test_a_call_after_one_that_was_cut_off_has_an_index_and_an_id_of_its_own():
    family = FORMATS["qwen3"]
    cut = '<tool_call>\n{"name": "search", "arguments": {"query": "a'
    segments = read(Stream(cut + family.weather, family.tokens, (), 1), family.form)
    check_deltas(segments)
    first, *_, last = [s.delta for s in segments if s.delta is not None]
    assert (first.index, first.name) == (0, "search") and last.index == 1 and last.id != first.id
    assert last.complete.index == 0 and last.complete.parsed == {"city": "Paris", "days": 3}


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "rm", "arguments": {"city": "Paris"}}',  # no tool of ours
        '{"arguments": {"city": "Paris"}, "name": "get_weather"}',  # the name comes last
        '{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}',  # encoded twice
        '[{"name": "get_weather", "arguments": {"city": "Paris"}}]',
    ],
)
def test_nothing_is_given_out_that_may_change(body):
    family = FORMATS["qwen3"]
    segments = read(Stream(f"<tool_call>{body}</tool_call>", family.tokens, (), 2), family.form)
    assert all(s.call for s in segments if s.delta is not None)
    check_deltas(segments)


def test_of_equal_keys_the_first_counts_as_it_was_given_out():
    family = FORMATS["qwen3"]
    body = '{"name": "search", "arguments": {"query": "a"}, "name": "get_weather", "arguments": {"city": "x"}}'
    segments = read(Stream(f"<tool_call>{body}</tool_call>", family.tokens, (), 2), family.form)
    check_deltas(segments)
    [call] = [s.call for s in segments if s.call]
    assert (call.name, call.parsed) == ("search", {"query": "a"})
