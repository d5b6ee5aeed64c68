"""Streams against the tokenizers library decoding everything at once, for every kind of decoder."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import raises

from mlxrt.errors import BadRequest, BadTokenizer
from mlxrt.text import Tokenizer

BYTES = [f"<0x{b:02X}>" for b in range(256)]
WORDS = [
    "▁",
    "▁Hello",
    "▁world",
    "Hello",
    "llo",
    "▁▁",
    "##ing",
    "run",
    ".",
    "n't",
    "'s",
    "don</w>",
    "x</w>",
    "é",
    " ",
    "a b",
]
LLAMA = [("Replace", "▁", " "), ("ByteFallback",), ("Fuse",), ("Strip", " ", 1, 0)]


def chain(*steps):
    from tokenizers import decoders

    return decoders.Sequence([getattr(decoders, name)(*args) for name, *args in steps])


def cases():
    from tokenizers import decoders

    return {
        "none": None,
        "byte level": decoders.ByteLevel(),
        "llama": chain(*LLAMA),
        "gemma": chain(*LLAMA[:3]),
        "strip more": chain(("Replace", "▁", " "), ("Fuse",), ("Strip", " ", 3, 0)),
        "strip each token": chain(("Replace", "▁", " "), ("Strip", " ", 1, 0)),
        "replace after fuse": chain(("Fuse",), ("Replace", "lo▁", "0"), ("Replace", "▁", " ")),
        "bytes without fuse": chain(("ByteFallback",), ("Metaspace",)),
        "metaspace": decoders.Metaspace(),
        "metaspace, nothing prepended": decoders.Metaspace(prepend_scheme="never"),
        "word piece": decoders.WordPiece(),
        "word piece as is": decoders.WordPiece(cleanup=False),
        "word ends": decoders.BPEDecoder(),
    }


def word_level(decoder):
    from tokenizers import AddedToken, Tokenizer, models

    tok = Tokenizer(models.WordLevel({t: i for i, t in enumerate([*BYTES, *WORDS])}, unk_token="▁"))
    if decoder is not None:
        tok.decoder = decoder
    tok.add_special_tokens(["<s>", AddedToken("<|é nd|>", special=True)])
    tok.add_tokens(["<user> ", "Ġraw"])
    return tok


def random_row(rng, backend) -> list[int]:
    """Words, characters in bytes, lone bytes and special tokens."""
    utf8, row = [[f"<0x{b:02X}>" for b in c.encode()] for c in "é日🦙ß"], []
    for _ in range(rng.randrange(8)):
        lucky = rng.random()
        if lucky < 0.3:
            row += [backend.token_to_id(t) for t in rng.choice(utf8)]
        else:
            row.append(rng.randrange(256) if lucky < 0.45 else rng.randrange(256, 256 + len(WORDS) + 4))
    return row


@pytest.mark.parametrize("name", cases())
def test_streams_give_what_the_library_gives(name, make_folder):
    backend = word_level(cases()[name])
    ours, rng = Tokenizer.from_folder(make_folder(backend)), random.Random(7)
    assert ours.vocab_size == 256 + len(WORDS) + 4
    for _ in range(150):
        row = random_row(rng, backend)
        for skip in (True, False):
            assert ours.decode(row, skip_special=skip) == backend.decode(row, skip_special_tokens=skip), row


@pytest.mark.parametrize("clean_up", [False, True])
@pytest.mark.parametrize("name", cases())
def test_after_a_prompt_the_text_is_what_is_added_to_it(name, clean_up, make_folder):
    backend = word_level(cases()[name])
    folder = make_folder(backend, tokenizer_config_json={"clean_up_tokenization_spaces": clean_up})
    ours, rng, added = Tokenizer.from_folder(folder), random.Random(8), 0
    for i in range(200):
        prompt, answer = random_row(rng, backend), random_row(rng, backend)
        if i % 10 == 0:  # longer than what a stream looks back at, bytes that begin a character in the middle
            prompt = [*prompt, *[backend.token_to_id(f"<0x{b:02X}>") for b in ("日" * 50).encode()], *prompt]
        before, whole = ours.decode(prompt), ours.decode(prompt + answer)
        if not clean_up:
            assert (before, whole) == (backend.decode(prompt), backend.decode(prompt + answer))
        stream = ours.detokenizer(prompt=prompt)
        text = "".join([*map(stream.push, answer), stream.finish()])
        if whole.startswith(before):  # else the answer's tokens changed what the prompt's end means
            assert text == whole.removeprefix(before)
            added += 1
        else:
            assert whole.endswith(text)
    assert added > 100


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_byte_level_never_shows_half_a_character(bpe, tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("bpe")
    bpe.save(str(folder / "tokenizer.json"))
    tok = Tokenizer.from_folder(folder)
    row = data.draw(st.lists(st.integers(0, tok.vocab_size - 1), max_size=12))
    row += tok.encode(data.draw(st.text(max_size=10)))
    stream = tok.detokenizer()
    shown = [stream.push(t) for t in row] + [stream.finish()]
    assert "".join(shown) == bpe.decode(row)
    for n in range(len(row)):  # what is shown stays: every continuation starts with it
        assert bpe.decode(row).startswith("".join(shown[: n + 1]))


def test_text_comes_as_soon_as_it_is_certain(bpe, make_folder):
    tok = Tokenizer.from_folder(make_folder(bpe))
    stream = tok.detokenizer()
    letters = [bpe.token_to_id(c) for c in ("ð", "Ł", "¦", "Ļ")]  # the bytes of a llama
    assert [stream.push(t) for t in [*letters, bpe.token_to_id("a")]] == ["", "", "", "🦙", "a"]
    assert stream.finish() == ""


def test_a_character_that_the_prompt_began_is_the_answers(bpe, make_folder):
    tok = Tokenizer.from_folder(make_folder(bpe))
    letters = [bpe.token_to_id(c) for c in ("ð", "Ł", "¦", "Ļ")]
    stream = tok.detokenizer(prompt=[bpe.token_to_id("a"), *letters[:2]])
    assert [stream.push(t) for t in letters[2:]] == ["", "🦙"]
    assert tok.detokenizer(prompt=[*letters, 10**6]).finish() == ""  # an id that only pads the embedding is no text


def test_an_unfinished_character_is_given_up_at_the_end(bpe, make_folder):
    stream = Tokenizer.from_folder(make_folder(bpe)).detokenizer()
    assert stream.push(bpe.token_to_id("ð")) == ""
    assert stream.finish() == "\ufffd"


@pytest.mark.parametrize("token", [-1, 10**6, True, 1.0, "a", None, 2**70])
def test_tokens_outside_the_vocabulary(bpe, make_folder, token):
    tok = Tokenizer.from_folder(make_folder(bpe))
    with raises(BadRequest, match="not in the vocabulary"):
        tok.detokenizer().push(token)
    with raises(BadRequest, match=f"ids go from 0 to {tok.vocab_size - 1}"):
        tok.decode([1, token])


@pytest.mark.parametrize(
    "steps",
    [
        [("CTC",)],
        [("Fuse",), ("ByteFallback",)],
        [("Replace", "REGEX", "x")],
        [("ByteLevel",), ("Metaspace",)],
        [("Fuse",), ("Strip", " ", 0, 1)],
    ],
)
def test_decoders_that_cannot_be_streamed_are_refused(make_folder, steps):
    from tokenizers import Regex

    steps = [tuple(Regex("a+") if a == "REGEX" else a for a in step) for step in steps]
    with raises(BadTokenizer, match="not supported"):
        Tokenizer.from_folder(make_folder(word_level(chain(*steps))))
