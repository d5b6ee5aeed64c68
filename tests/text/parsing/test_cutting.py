"""Random outputs in every format, cut into tokens at random: never an exception, and no cut changes the result.

python -m tests.text.parsing.test_cutting --count 20000     as many cases over all formats
"""

import argparse
import random
import re

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .cutting import Stream, fold, read
from .formats import FORMATS

PIECES = (
    " ", "\n", "\n\n", "{", "}", "[", "]", '"', "\\", ",", ":", "null", "3", "Paris", "é🦙", "text", "a b",
    '{"name": "get_weather", "arguments": {"city": "Paris"}}', '"name": ', '"get_weather"', '"arguments": ',
    "get_weather", "search", "<", ">", "</", "<tool", "<think", "|>", "<|", "call:", "```json\n", "```", "analysis",
    "final", "commentary", " to=functions.get_weather", "thought\n", "<function=", "<parameter=city>", "</parameter>",
    "</function>", '<invoke name="search">', "</invoke>", ";", "(city=", ")", "\ufdd3", "\x00",
)  # fmt: skip


def make_text(family, rng: random.Random) -> str:
    """Parts of good answers, markers and garbage."""
    good = [family.weather, family.search, family.think.format("Hmm."), family.final.format("Yes."), family.between]
    good += [part for part in (family.broken, family.unknown, family.unclosed) if part]
    parts = []
    for _ in range(rng.randint(0, 12)):
        source = rng.choice((good, family.markers, PIECES, PIECES))
        part = rng.choice(source)
        parts.append(part if rng.random() < 0.9 else part[: rng.randint(0, len(part))])
    return "".join(parts)


def check(family, seed: int) -> None:
    rng = random.Random(seed)
    text = make_text(family, rng)
    tokens = (*family.special, *family.tokens)
    if rng.random() < 0.3:
        tokens = ()  # a vocabulary without them
    special = family.special if tokens else ()
    tail = rng.choice((family.tail, family.think.partition("{}")[0]))
    whole = read(Stream(text, tokens, special, None), family.form, tail=tail)
    result = fold(whole)
    assert result.raw == text
    check_shown(family, whole, special)
    for cut in range(3):
        assert fold(read(Stream(text, tokens, special, rng.randint(0, 1 << 30)), family.form, tail=tail)) == result, cut


def check_shown(family, segments, special) -> None:
    """Answer and reasoning leave out markers, their headers and white space, nothing else; specials never show."""
    if family.form.calls != "harmony":
        markers = "|".join(map(re.escape, sorted(family.markers, key=len, reverse=True)))

        def bare(text: str) -> str:
            """What a marker was taken out of may read like one: that goes too."""
            less = re.sub(rf"\s|{markers}", "", text)
            return text if less == text else bare(less)

        for kind in ("answer", "reasoning"):
            shown = "".join(s.text for s in segments if s.kind == kind)
            raw = "".join(s.raw for s in segments if s.kind == kind)
            if family.form.reasoning == "gemma4":  # nor is a channel's name, or the beginning of one
                names = len("thought") * (1 + raw.count("<|channel>"))
                assert len(bare(raw)) - names <= len(bare(shown)) <= len(bare(raw))
            elif not any(s.call for s in segments):
                assert sorted(bare(shown)) == sorted(bare(raw))
    for segment in segments:
        assert not any(marker in segment.text for marker in special)


@given(st.integers(0, 1 << 60))
@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_cut_changes_the_result(seed):
    check(list(FORMATS.values())[seed % len(FORMATS)], seed)


@given(st.binary(max_size=40), st.integers(0, 1 << 30))
@settings(max_examples=150, deadline=None)
def test_bytes_that_are_no_text(data, seed):
    """Invalid UTF-8 between markers: nothing raises, and what is raw is what the detokenizer gives."""
    rng = random.Random(seed)
    family = list(FORMATS.values())[seed % len(FORMATS)]
    stream = Stream(make_text(family, rng), (*family.special, *family.tokens), family.special, seed)
    for byte in data:
        stream.pieces.append(bytes([byte]))
        stream.ids.insert(rng.randint(0, len(stream.ids)), len(stream.pieces) - 1)
    found = fold(read(stream, family.form, tail=family.tail))
    plain = stream.vocabulary.detokenizer(())
    assert found.raw == "".join([*map(plain.push, stream.ids), plain.finish()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    families = list(FORMATS.values())
    for i in range(args.count):
        check(families[i % len(families)], args.seed * 1_000_003 + i)
    print(f"{args.count} cases over {len(families)} formats, 3 cuttings each: no difference")


if __name__ == "__main__":
    main()
