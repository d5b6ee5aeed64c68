"""Vocabularies out of GGUF metadata against the tokenizers library's own, and what is refused."""

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import raises

from mlxrt.errors import BadRequest, BadTokenizer
from mlxrt.text import Tokenizer
from mlxrt.text.gguf_to_json import write_tokenizer

KEY = "tokenizer.ggml."


def test_the_same_tokens_as_the_vocabulary_it_was_made_of(bpe, bpe_metadata, samples):
    tok = Tokenizer.from_gguf(bpe_metadata)
    for text in samples:
        ids = bpe.encode(text).ids
        assert tok.encode(text) == ids
        assert tok.decode(ids) == bpe.decode(ids)
        assert tok.decode(ids, skip_special=False) == text
    assert (tok.vocab_size, tok.bos_id) == (450, 3)
    assert tok.eos_ids == {0, 2}  # the named one and <|endoftext|>, which ends a turn wherever it is a control token


@settings(deadline=None, max_examples=100)
@given(text=st.text(max_size=40))
def test_any_text_survives(bpe_metadata, text):
    tok = Tokenizer.from_gguf(bpe_metadata)
    assert tok.decode(tok.encode(text), skip_special=False) == text


def test_kinds_of_tokens(bpe_metadata):
    types = [*bpe_metadata[KEY + "token_type"], 4, 4]
    tokens = [*bpe_metadata[KEY + "tokens"], "<user é>", "   "]
    tok = Tokenizer.from_gguf(bpe_metadata | {KEY + "tokens": tokens, KEY + "token_type": types})
    assert tok.encode("a<user é>b") == [*tok.encode("a"), 450, *tok.encode("b")]
    assert tok.encode("x   y")[1] == 451
    assert tok.decode([450, 451]) == "<user é>   "  # stored as they are, not in the byte alphabet
    assert tok.decode([1, 450, 2]) == "<user é>"  # control tokens are special, user-defined ones are text


def test_letters_of_bytes_that_no_text_has_are_kept_in_tokenizer_json(bpe_metadata, tmp_path):
    """DeepSeek's vocabularies have À and others as tokens of their own; a byte-level decoder reads them as bytes."""
    tokens, types = bpe_metadata[KEY + "tokens"], [*bpe_metadata[KEY + "token_type"]]
    for letter in "Àÿ":
        types[tokens.index(letter)] = 4
    values = bpe_metadata | {KEY + "token_type": types}
    assert write_tokenizer(tmp_path, values)
    text = "À la carte, ÿ and é"
    made = [Tokenizer.from_gguf(values), Tokenizer.from_folder(tmp_path)]
    ids = [tok.encode(text) for tok in made]
    assert ids[0] == ids[1] and tokens.index("À") in ids[0]
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert [tok.decode(ids[0]) for tok in (*made, theirs)] == [text] * 3


def test_bos_flags(bpe_metadata):
    assert Tokenizer.from_gguf(bpe_metadata).encode("a")[0] != 3
    assert Tokenizer.from_gguf(bpe_metadata | {KEY + "add_bos_token": True}).encode("a")[0] == 3
    assert Tokenizer.from_gguf(bpe_metadata | {KEY + "pre": "llama-bpe"}).encode("a")[0] == 3
    both = bpe_metadata | {KEY + "add_bos_token": True, KEY + "add_eos_token": True}
    assert Tokenizer.from_gguf(both).encode("") == [3, 2]
    assert Tokenizer.from_gguf(both).encode("", special=False) == []


def test_chat_does_not_add_bos_again(bpe_metadata):
    tok = Tokenizer.from_gguf(bpe_metadata | {KEY + "add_bos_token": True})
    assert tok.chat([{"role": "user", "content": "hi"}]) == [3, *tok.encode("user: hi\n", special=False)]


def test_ends(bpe_metadata):
    ends = Tokenizer.from_gguf(bpe_metadata | {KEY + "eot_token_id": 7, KEY + "eom_token_id": 8}).eos_ids
    assert {2, 7, 8} <= ends


def test_a_byte_without_a_token_is_said_not_dropped(bpe_metadata):
    tokens = ["[gone]" if t == "ó" else t for t in bpe_metadata[KEY + "tokens"]]  # byte 0xF3
    tok = Tokenizer.from_gguf(bpe_metadata | {KEY + "tokens": tokens})
    assert tok.encode("é") == Tokenizer.from_gguf(bpe_metadata).encode("é")
    with raises(BadRequest, match="no token for byte 0xF3"):
        tok.encode("\U000e0001")


def test_the_digest_follows_vocabulary_behaviour_and_template(bpe_metadata):
    changes = [{}, {KEY + "pre": "qwen2"}, {KEY + "add_bos_token": True}, {"tokenizer.chat_template": "x"}]
    changes += [{KEY + "eos_token_id": 4}, {KEY + "merges": bpe_metadata[KEY + "merges"][:-1]}]
    assert len({Tokenizer.from_gguf(bpe_metadata | c).digest for c in changes}) == len(changes)
    same = {"general.name": "another", "llama.block_count": 3}
    assert Tokenizer.from_gguf(bpe_metadata | same).digest == Tokenizer.from_gguf(bpe_metadata).digest


GONE = object()
BAD_BPE = [
    ({"model": GONE}, "no tokenizer.ggml.model"),
    ({"model": 3}, "tokenizer.ggml.model must be a string"),
    *[({"model": m}, f"'{m}', which mlxrt cannot use") for m in ("bert", "t5", "rwkv", "")],
    ({"pre": "never-heard-of"}, "'never-heard-of', which mlxrt does not know; known: .*llama-bpe"),
    ({"pre": GONE}, "no tokenizer.ggml.pre"),
    ({"tokens": GONE}, "tokens must be a list, and is missing"),
    ({"tokens": []}, "tokens is empty"),
    ({"tokens": "abc"}, "tokens must be a list"),
    ({"tokens": [1, 2]}, "tokens must hold str only"),
    ({"tokens": ["a", "b", "a"]}, "'a' twice"),
    ({"tokens": ["a", "\ud800"]}, "not valid text"),
    ({"token_type": [1]}, "token_type has 1 entries for 450 tokens"),
    ({"token_type": ["x"] * 450}, "token_type must hold int only"),
    ({"token_type": [True] * 450}, "token_type must hold int only"),
    ({"merges": GONE}, "merges must be a list"),
    ({"merges": ["ab"]}, r"merges\[0\] is 'ab'; expected two tokens with a space"),
    ({"merges": ["a "]}, "two tokens with a space"),
    ({"merges": ["a nothere"]}, "merges cannot be used"),
    ({"bos_token_id": 450}, "bos_token_id is 450; the vocabulary has ids 0 to 449"),
    ({"eos_token_id": -1}, "eos_token_id is -1"),
    ({"eot_token_id": 1.5}, "eot_token_id is 1.5"),
    ({"eom_token_id": 2**80}, "eom_token_id is"),
    ({"add_bos_token": "yes"}, "add_bos_token must be true or false"),
    ({"add_bos_token": True, "bos_token_id": GONE}, "names no tokenizer.ggml.bos_token_id"),
]
BAD_SPM = [
    ({"scores": GONE}, "scores must be a list"),
    ({"scores": [0.0]}, "scores has 1 entries"),
    ({"scores": [float("nan")] * 460}, "finite"),
    ({"tokens": [f"t{i}" for i in range(460)]}, "no token for byte <0x00>"),
    ({"add_space_prefix": 1}, "add_space_prefix must be true or false"),
]


def changed(metadata, change):
    new = metadata | {KEY + k: v for k, v in change.items()}
    return {k: v for k, v in new.items() if v is not GONE}


@pytest.mark.parametrize("change, message", BAD_BPE)
def test_bad_bpe_metadata(bpe_metadata, change, message):
    with raises(BadTokenizer, match=message):
        Tokenizer.from_gguf(changed(bpe_metadata, change))


@pytest.mark.parametrize("change, message", BAD_SPM)
def test_bad_spm_metadata(spm_metadata, change, message):
    with raises(BadTokenizer, match=message):
        Tokenizer.from_gguf(changed(spm_metadata, change))


def test_bad_template(bpe_metadata):
    with raises(BadTokenizer, match="chat template default must be a string"):
        Tokenizer.from_gguf(bpe_metadata | {"tokenizer.chat_template": 3})


def test_every_pretokenizer_keeps_all_text(bpe_metadata, samples):
    from mlxrt.text.pretokenizers import pretokenizers

    for name in pretokenizers():
        tok = Tokenizer.from_gguf(bpe_metadata | {KEY + "pre": name})
        for text in samples:
            assert tok.decode(tok.encode(text, special=False), skip_special=False) == text, name
