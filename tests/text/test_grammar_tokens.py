"""The tokens that a grammar forces are the text they stand for, whatever they could merge with."""

import pytest

from mlxrt.text import Tokenizer
from mlxrt.text.grammar import TokenizerView


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
