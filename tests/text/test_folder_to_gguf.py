"""Tokenizers of folders as GGUF metadata: the same tokens, names, ends and templates, or a refusal that says why."""

import json

import pytest
import tokenizers
from pytest import raises
from tokenizers import Regex, normalizers, pre_tokenizers

from mlxrt.errors import BadTokenizer
from mlxrt.text import Tokenizer
from mlxrt.text.folder_to_gguf import check_alike, tokenizer_metadata
from mlxrt.text.gguf_to_json import write_tokenizer
from mlxrt.text.pretokenizers import pretokenizers

from ..support.log_lines import capture_log
from .test_spm import CONFIGS, folder_of

KEY = "tokenizer.ggml."
CHAT = {"bos_token": "<s>", "eos_token": "<|im_end|>", "chat_template": "{{ bos_token }}{{ messages[0].content }}"}


def made(folder, rows, **options) -> dict:
    values = tokenizer_metadata(folder, rows, **options)
    check_alike(folder, values)
    return values


def test_byte_level_bpe(bpe, make_folder, samples):
    folder = make_folder(bpe, tokenizer_config_json=CHAT)
    values = made(folder, 460, stops=[2, 0, 7])
    ours, theirs = Tokenizer.from_gguf(values), Tokenizer.from_folder(folder)
    assert values[KEY + "model"] == "gpt2" and values[KEY + "pre"] == "gpt-2"
    assert len(values[KEY + "tokens"]) == 460 and values[KEY + "token_type"][-1] == 5
    assert [values[f"{KEY}{end}_token_id"] for end in ("eos", "eot", "eom")] == [2, 0, 7]
    for text in samples:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text), skip_special=False) == text
    assert ours.render([{"role": "user", "content": "hi"}]) == theirs.render([{"role": "user", "content": "hi"}])
    assert ours.bos_id == theirs.bos_id == 3 and ours.special_ids >= theirs.special_ids


@pytest.mark.parametrize("name", ["llama-bpe", "qwen2", "smollm", "tekken", "gpt-4o", "deepseek-llm"])
def test_the_pre_tokenizer_is_named_by_its_patterns(name, bpe_metadata, tmp_path, samples):
    """GGUF to tokenizer.json and back."""
    values = bpe_metadata | {KEY + "pre": name}
    assert write_tokenizer(tmp_path, values)
    again = made(tmp_path, 450)
    assert pretokenizers()[again[KEY + "pre"]] == pretokenizers()[name]
    for key in ("tokens", "token_type", "merges", "bos_token_id", "eos_token_id"):
        assert again[KEY + key] == values[KEY + key], key
    left, right = Tokenizer.from_gguf(values), Tokenizer.from_gguf(again)
    assert [left.encode(text) for text in samples] == [right.encode(text) for text in samples]


@pytest.mark.parametrize("name", CONFIGS)
def test_sentencepiece(name, spm_bpe, tmp_path, samples):
    folder = folder_of(spm_bpe, tmp_path, **CONFIGS[name])
    theirs = Tokenizer.from_folder(folder)
    values = made(folder, theirs.vocab_size + 3)
    ours = Tokenizer.from_gguf(values)
    assert values[KEY + "model"] == "llama" and values[KEY + "add_space_prefix"] is True
    assert values[KEY + "token_type"][values[KEY + "tokens"].index("<tool>")] == 4  # in tokenizer.model alone
    for text in samples:
        if "<" not in text:  # beside special tokens llama.cpp adds spaces that others do not
            assert ours.encode(text) == theirs.encode(text), text
            assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))


def test_sentencepiece_in_tokenizer_json(spm_metadata, tmp_path, samples):
    """Ranked merges become scores again."""
    assert write_tokenizer(tmp_path, spm_metadata)
    values = made(tmp_path, len(spm_metadata[KEY + "tokens"]))
    assert values[KEY + "model"] == "llama" and values[KEY + "token_type"] == spm_metadata[KEY + "token_type"]
    ours, theirs = Tokenizer.from_gguf(values), Tokenizer.from_gguf(spm_metadata)
    for text in samples:
        assert ours.encode(text) == theirs.encode(text), text


def test_characters_stay_bpe_for_gemma_4(spm_metadata, tmp_path, samples):
    plain = spm_metadata | {KEY + "add_space_prefix": False}
    assert write_tokenizer(tmp_path, plain)
    values = made(tmp_path, len(spm_metadata[KEY + "tokens"]), chars=True)
    assert values[KEY + "model"] == "gemma4" and KEY + "scores" not in values
    ours, theirs = Tokenizer.from_gguf(values), Tokenizer.from_folder(tmp_path)
    assert [ours.encode(text) for text in samples] == [theirs.encode(text) for text in samples]


def test_tokens_beyond_the_embedding_are_left_out(bpe, make_folder):
    logged = capture_log()
    values = tokenizer_metadata(make_folder(bpe), 440)
    assert len(values[KEY + "tokens"]) == 440 and "10 tokens have no embedding" in logged[0]


def test_ends_that_have_no_key(bpe, make_folder):
    logged = capture_log()
    tokenizer_metadata(make_folder(bpe), 450, stops=[0, 1, 2, 3, 400])
    assert len(logged) == 1 and "room for three" in logged[0]


def test_nfc_is_reported_and_other_normalizers_refused(bpe, make_folder):
    logged = capture_log()
    copy = tokenizers.Tokenizer.from_str(bpe.to_str())
    copy.normalizer = normalizers.NFC()
    assert made(make_folder(copy), 450) and "NFC" in logged[0]
    copy.normalizer = normalizers.Lowercase()
    with raises(BadTokenizer, match="normalizer Lowercase"):
        made(make_folder(copy), 450)


def test_unknown_pre_tokenizers_are_refused_by_name(bpe, make_folder):
    copy = tokenizers.Tokenizer.from_str(bpe.to_str())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    copy.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\w+x"), "isolated"), level])
    with raises(BadTokenizer, match=r"pre-tokenizer \\w\+x has no name in llama.cpp"):
        made(make_folder(copy), 450)
    copy.pre_tokenizer = pre_tokenizers.Whitespace()
    with raises(BadTokenizer, match=r"Whitespace.* has no form in GGUF"):
        made(make_folder(copy), 450)


def test_other_models_are_refused(spm_unigram, tmp_path, bpe, make_folder):
    with raises(BadTokenizer, match="encoded differently"):
        made(folder_of(spm_unigram, tmp_path), 460)
    data = json.loads(bpe.to_str()) | {
        "model": {"type": "WordLevel", "vocab": {"a": 0, "[UNK]": 1}, "unk_token": "[UNK]"}
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    with raises(BadTokenizer, match="WordLevel"):
        made(tmp_path, 460)
