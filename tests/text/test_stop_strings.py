from hypothesis import given
from hypothesis import strategies as st
from pytest import mark, raises

from mlxrt.errors import BadRequest
from mlxrt.text import StopMatcher


def run(stops, chunks):
    matcher, out = StopMatcher(stops), ""
    for chunk in chunks:
        emit, matched = matcher.push(chunk)
        out += emit
        if matched:
            return out, True
    return out + matcher.finish(), matcher.matched


def truth(stops, text):
    positions = [text.find(s) for s in stops if s in text]
    return (text[: min(positions)], True) if positions else (text, False)


@given(st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.lists(st.text("abc", max_size=5), max_size=12))
def test_any_chunking_gives_what_the_full_text_gives(stops, chunks):
    assert run(tuple(stops), chunks) == truth(stops, "".join(chunks))


def test_a_stop_inside_another_waits_for_the_outer_one():
    assert run(("abcd", "c"), ["xa", "b", "c", "d"]) == ("x", True)
    assert run(("abcd", "c"), ["xa", "b", "c", "e"]) == ("xab", True)
    assert run(("abcd", "c"), ["xa", "b", "c"]) == ("xab", True)


@given(st.text("ab", min_size=1, max_size=4), st.text("abc", max_size=20))
def test_nothing_is_held_that_cannot_become_a_stop(stop, text):
    matcher = StopMatcher((stop,))
    shown = "".join(matcher.push(c)[0] for c in text)
    if not matcher.matched:
        held = text[len(shown) :]
        assert stop.startswith(held) and len(held) < len(stop)
        assert not any(stop.startswith(text[i:]) for i in range(len(shown)))  # nothing longer could have matched


def test_text_after_a_stop_is_dropped():
    matcher = StopMatcher(("User:",))
    assert matcher.push("ok Us") == ("ok ", False)
    assert matcher.push("er: more") == ("", True)
    assert matcher.push("again") == ("", True)
    assert matcher.finish() == ""


def test_without_stops_text_passes():
    assert StopMatcher(()).push("abc") == ("abc", False)


@mark.parametrize("stops", [("",), (1,), ("a", None)])
def test_bad_stops(stops):
    with raises(BadRequest, match="stop must be"):
        StopMatcher(stops)
