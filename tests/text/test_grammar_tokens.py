"""The tokens that a grammar forces are the text they stand for, whatever they could merge with."""

import numpy as np
import pytest

from mlxrt import BadRequest
from mlxrt.text import Tokenizer
from mlxrt.text.grammar import AHEAD, GrammarCompiler, GrammarMatcher, TokenizerView
from mlxrt.text.response_format import ResponseFormat
from tests.support.ascii_tokenizer import write_ascii_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("merges")
    characters = ["Ċ", "Ġ", *map(chr, range(33, 127))]
    merges = [("x", "a"), ("Ċ", "a"), ("}", "a"), ("7", "b"), ("a", "b")]
    vocabulary = {text: i for i, text in enumerate([*characters, *map("".join, merges)])}
    library = Library(models.BPE(vocab=vocabulary, merges=merges))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.save(str(folder / "tokenizer.json"))
    return Tokenizer.from_folder(folder)


@pytest.mark.parametrize("text", ["a", "ab", "b", "xa", "a b", "\n", '{"a": 7}', "7b"])
def test_forced_tokens_are_their_text(tokenizer, text):
    view = TokenizerView(tokenizer, tokenizer.vocab_size, frozenset())
    ids = view(text)
    assert ids and b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


@pytest.mark.parametrize("n", [1, 255, 256, 257, 3000])
def test_long_forced_texts(tokenizer, monkeypatch, n):
    """Of a text that has no alternative a bounded part is tokenized at every token: all of it would be quadratic."""
    text, asked = ("ab7ba }a" * n)[:n], []
    encode = Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", lambda self, t, **o: asked.append(len(t)) or encode(self, t, **o))
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, frozenset())
    assert write_forced(compiler, tokenizer, text) == text.encode()
    assert 0 < max(asked) <= AHEAD + 1


def test_forced_text_that_the_tokenizer_normalises(tmp_path):
    """Qwen's tokenizers compose characters: what they make of a decomposed one is another text."""
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: i for i, text in enumerate([*alphabet, "ca", "caf"])}
    library = Library(models.BPE(vocab=vocabulary, merges=[("c", "a"), ("ca", "f")]))
    library.normalizer = normalizers.NFC()
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, frozenset())
    for text in ("cafe\u0301 noir", "\u0301", "caf\u00e9"):
        assert write_forced(compiler, tokenizer, text) == text.encode()


def write_forced(compiler: GrammarCompiler, tokenizer: Tokenizer, text: str) -> bytes:
    """The only answer that a choice of one text leaves."""
    matcher = compiler.matcher(ResponseFormat.parse({"type": "choice", "choices": [text]}))
    row, written, ended = np.empty(-(-tokenizer.vocab_size // 32), np.uint32), b"", False
    while not ended:
        matcher.fill_mask(row)
        token = int(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))[0])
        written += tokenizer.token_bytes(token)
        ended = matcher.advance(token)
    return written


def test_escaped_characters_of_gbnf(tmp_path):
    """llguidance's own converter makes a lexer error of \\u00E9."""
    tokenizer = write_ascii_tokenizer(tmp_path)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, frozenset({0}))
    text = r'root ::= "\u0041" [\u0042-\u0043] "\U00000044" "\\u0045"'
    form = ResponseFormat.parse({"type": "grammar", "grammar": text})
    assert takes(compiler.matcher(form), tokenizer, r"ACD\u0045") and not takes(
        compiler.matcher(form), tokenizer, "AAD"
    )
    assert compiler.matcher(ResponseFormat.parse({"type": "grammar", "grammar": r'root ::= "caf\u00E9" | "x"'}))


def test_gbnf_without_a_rule_it_names(tmp_path):
    tokenizer = write_ascii_tokenizer(tmp_path)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, frozenset({0}))
    with pytest.raises(BadRequest, match="'nothing' not found"):
        compiler.matcher(ResponseFormat.parse({"type": "grammar", "grammar": 'root ::= "a" nothing'}))


def takes(matcher: GrammarMatcher, tokenizer: Tokenizer, text: str) -> bool:
    row = np.empty(-(-tokenizer.vocab_size // 32), np.uint32)
    for token in tokenizer.encode(text, special=False):
        matcher.fill_mask(row)
        if not row[token // 32] >> np.uint32(token % 32) & 1:
            return False
        matcher.advance(token)
    return True
