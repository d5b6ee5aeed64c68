"""Every format's answers, whole and cut into tokens anywhere."""

import pytest

from .cutting import Stream, fold, read
from .formats import FORMATS, SEARCH, WEATHER

SEEDS = (None, *range(12))


@pytest.fixture(params=FORMATS, ids=str)
def family(request):
    return FORMATS[request.param]


def parse(family, text, seed=None, tail=None):
    stream = Stream(text, (*family.special, *family.tokens), family.special, seed)
    found = fold(read(stream, family.form, tail=family.tail if tail is None else tail))
    assert found.raw == text
    return found


def names_and_arguments(found):
    return [(c.name, c.parsed) for c in found.calls]


@pytest.mark.parametrize("seed", SEEDS)
def test_reasoning_two_calls_and_an_answer(family, seed):
    calls = family.weather + family.between + family.search
    if family.form.calls == "llama3":
        found = parse(family, calls, seed)
        assert found.answer == ""
    else:
        found = parse(family, family.think.format("Hmm, é.") + calls + family.final.format("Done."), seed)
        assert found.answer == "Done."
        assert found.reasoning == "Hmm, é."
    assert names_and_arguments(found) == [WEATHER, SEARCH]
    assert all(c.error is None for c in found.calls)
    assert len({c.id for c in found.calls}) == 2


@pytest.mark.parametrize("seed", SEEDS)
def test_only_an_answer(family, seed):
    text = "  Hello é\n\nworld < > { [ \n"
    assert parse(family, text, seed).answer == text


@pytest.mark.parametrize("seed", (None, 1, 2))
def test_broken_arguments_stay_a_call(family, seed):
    if not family.broken:
        pytest.skip("the format has no syntax of values")
    found = parse(family, family.broken, seed)
    [call] = found.calls
    assert call.name == "get_weather" and call.parsed is None and call.error
    assert "city" in call.arguments
    assert found.answer == ""


@pytest.mark.parametrize("seed", (None, 1, 2))
@pytest.mark.parametrize("what", ["unknown", "unclosed"])
def test_no_call_is_text(family, what, seed):
    text = getattr(family, what)
    found = parse(family, text, seed)
    assert not found.calls
    shown = text
    for marker in family.special:
        shown = shown.replace(marker, "")
    if family.form.calls == "harmony":
        shown = text.partition("<|message|>")[2].removesuffix("<|call|>")
    assert found.answer == shown


@pytest.mark.parametrize("seed", (None, 1, 2, 3))
def test_a_call_ends_reasoning(family, seed):
    if not family.think or family.form.calls == "harmony":
        pytest.skip("its reasoning cannot be left open")
    begun = family.think.format("Let me look.").partition("look.")[0] + "look.\n"
    found = parse(family, begun + family.weather + "\nIt rains.", seed)
    assert (found.reasoning, found.answer) == ("Let me look.", "It rains.")
    assert names_and_arguments(found) == [WEATHER]


@pytest.mark.parametrize("seed", (None, 1, 2, 3))
def test_text_before_between_and_after_calls(family, seed):
    if family.form.calls in ("llama3", "harmony"):
        pytest.skip("a call begins a message")
    text = "I look.\n\n" + family.weather + "\n\nAnd search.\n" + family.search + "\n\nDone.\n"
    found = parse(family, text, seed)
    assert found.answer == "I look.\n\nAnd search.\nDone.\n"
    assert names_and_arguments(found) == [WEATHER, SEARCH]


@pytest.mark.parametrize("seed", (None, 1, 2, 3))
def test_reasoning_that_the_prompt_opened(family, seed):
    if family.form.reasoning in ("none", "harmony"):
        pytest.skip("its prompts open nothing")
    opened, _, closed = family.think.partition("{}")
    found = parse(family, "I think.\n" + closed + "Yes.", seed, tail="user text" + opened)
    assert (found.reasoning, found.answer) == ("I think.", "Yes.")
    found = parse(family, "Yes.", seed, tail=opened + closed)
    assert (found.reasoning, found.answer) == ("", "Yes.")


def test_an_example_in_the_prompt_opens_nothing():
    found = parse(FORMATS["qwen3"], "Yes.", tail="Write <think> first.<|im_end|>\n<|im_start|>assistant\n")
    assert (found.reasoning, found.answer) == ("", "Yes.")


def test_characters_of_a_marker_that_is_a_token_are_text():
    family = FORMATS["qwen3"]
    text = family.weather.replace("<tool_call>", "<tool_ca\ue000ll>").replace("\ue000", "")
    stream = Stream(text, (), (), 3)
    stream.added = {"<tool_call>": len(stream.pieces)}
    stream.pieces.append(b"<tool_call>")
    found = fold(read(stream, family.form))
    assert not found.calls and found.answer.startswith("<tool_call>")


def test_the_end_token_is_not_shown_and_ends_a_call():
    gpt, gemma = FORMATS["gpt_oss"], FORMATS["gemma4"]
    stream = Stream(gpt.weather, gpt.special, gpt.special, 5)
    assert names_and_arguments(fold(read(stream, gpt.form, tail=gpt.tail, hide_last=True))) == [WEATHER]
    text = gemma.weather.removesuffix("<tool_call|>") + "<|tool_response>"
    stream = Stream(text, gemma.special, gemma.special, 5)
    assert names_and_arguments(fold(read(stream, gemma.form, hide_last=True))) == [WEATHER]
    stream = Stream("Yes.", (), (), None)
    stream.pieces.append(b"END")
    stream.ids.append(len(stream.pieces) - 1)
    found = fold(read(stream, FORMATS["qwen3"].form, hide_last=True))
    assert (found.answer, found.raw) == ("Yes.", "Yes.END")
