"""Checkpoint folders against transformers reading the same folder."""

import json

import pytest
from pytest import raises

from mlxrt.errors import BadRequest, BadTokenizer, NoTokenizer
from mlxrt.text import Tokenizer

FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
CHAT = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"

CONFIGS = {
    "plain": {},
    "bos": {"add_bos_token": True, "bos_token": "<s>"},
    "bos as an object": {
        "add_bos_token": True,
        "bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": False},
    },
    "bos and eos": {"add_bos_token": True, "add_eos_token": True, "bos_token": "<s>", "eos_token": "</s>"},
    "bos wanted, none there": {"add_bos_token": True},
    "new special tokens": {"eos_token": "<|im_end|>", "pad_token": "<pad>", "extra_special_tokens": ["<tool>"]},
    "added by id": {
        "added_tokens_decoder": {
            "450": {"content": "<tool>", "special": False},
            "451": {"content": "<x>", "special": True, "rstrip": True},
        }
    },
    "clean up": {"clean_up_tokenization_spaces": True},
    "limits ignored": {"model_max_length": 4},
    "special tokens as text": {"split_special_tokens": True, "eos_token": "</s>"},
}


def theirs(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder))


def compare(folder, samples):
    ours, truth = Tokenizer.from_folder(folder), theirs(folder)
    for text in samples:
        for special in (True, False):
            ids = truth.encode(text, add_special_tokens=special)
            assert ours.encode(text, special=special) == ids, text
            for skip in (True, False):
                assert ours.decode(ids, skip_special=skip) == truth.decode(ids, skip_special_tokens=skip), text
    assert ours.bos_id == truth.bos_token_id
    assert ours.eos_ids == ({truth.eos_token_id} - {None})
    assert ours.vocab_size == len(truth)
    return ours, truth


@pytest.mark.parametrize("name", CONFIGS)
def test_byte_level_folders(name, bpe, make_folder, samples):
    compare(make_folder(bpe, tokenizer_config_json=FAST | CONFIGS[name]), samples)


def test_the_files_own_post_processor_counts(bpe, make_folder, samples):
    from tokenizers import Tokenizer as Fast
    from tokenizers import processors

    tok = Fast.from_str(bpe.to_str())
    tok.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 3), ("</s>", 4)])
    folder = make_folder(tok, tokenizer_config_json=FAST | {"bos_token": "<s>"})
    compare(folder, samples)
    assert Tokenizer.from_folder(folder).encode("a")[0] == 3
    (folder / "tokenizer_config.json").write_text(json.dumps(FAST | {"bos_token": "<s>", "add_bos_token": False}))
    compare(folder, samples)  # transformers does not look at add_bos_token here


@pytest.mark.parametrize("bos, eos", [(True, True), (True, False), (False, True), (False, False)])
def test_llama_classes_decide_on_bos_and_eos(bos, eos, bpe, make_folder):
    config = {"add_bos_token": bos, "add_eos_token": eos, "bos_token": "<s>", "eos_token": "</s>"}
    folder = make_folder(bpe, tokenizer_config_json={"tokenizer_class": "LlamaTokenizerFast"} | config)
    assert Tokenizer.from_folder(folder).encode("a") == [3] * bos + bpe.encode("a").ids + [4] * eos


def test_limits_and_padding_of_the_training_run_are_dropped(bpe, make_folder):
    from tokenizers import Tokenizer as Fast

    tok = Fast.from_str(bpe.to_str())
    tok.enable_truncation(2)
    tok.enable_padding(length=64)
    assert Tokenizer.from_folder(make_folder(tok)).encode("a b c d e f") == bpe.encode("a b c d e f").ids


@pytest.mark.parametrize("kind", ["WordPiece", "Unigram"])
def test_clean_up_of_word_level_vocabularies(kind, make_folder, samples):
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, pre_tokenizers

    words = [
        "[UNK]",
        "I",
        "do",
        "n",
        "'",
        "t",
        "not",
        "'s",
        "n't",
        ".",
        ",",
        "?",
        "!",
        "▁I",
        "▁.",
        "▁'s",
        "▁n't",
        "▁",
        "s",
    ]
    if kind == "WordPiece":
        tok = Fast(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
        tok.pre_tokenizer, tok.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece(cleanup=False)
    else:
        tok = Fast(models.Unigram([(w, -float(i)) for i, w in enumerate(words)], unk_id=0))
        tok.pre_tokenizer, tok.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    folder = make_folder(tok, tokenizer_config_json=FAST | {"clean_up_tokenization_spaces": True})
    ours, truth = compare(folder, ["I do n't . I 's not , ' ! ?"])
    for n in range(300):
        ids = [(n * 7 + i * i * 5) % len(words) for i in range(n % 9)]
        assert ours.decode(ids) == truth.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("where", ["config", "list", "jinja", "json"])
def test_where_chat_templates_live(where, bpe, make_folder):
    tools = CHAT + "{{ tools | length }}"
    files = {
        "config": {"tokenizer_config_json": FAST | {"bos_token": "<s>", "chat_template": CHAT}},
        "list": {
            "tokenizer_config_json": FAST
            | {
                "bos_token": "<s>",
                "chat_template": [{"name": "default", "template": CHAT}, {"name": "tool_use", "template": tools}],
            }
        },
        "jinja": {
            "tokenizer_config_json": FAST | {"bos_token": "<s>", "chat_template": "not this one"},
            "chat_template_jinja": CHAT,
        },
        "json": {"tokenizer_config_json": FAST | {"bos_token": "<s>"}, "chat_template_json": {"chat_template": CHAT}},
    }[where]
    folder = make_folder(bpe, **files)
    tok, messages = Tokenizer.from_folder(folder), [{"role": "user", "content": "Größe?"}]
    assert tok.has_template
    assert tok.render(messages) == "<s><|im_start|>user\nGröße?<|im_end|>\n"
    ids = tok.chat(messages)
    assert ids.count(tok.bos_id) == 1 and ids[0] == tok.bos_id
    if where != "json":  # transformers reads that file for processors only
        assert ids == theirs(folder).apply_chat_template(messages, tokenize=True, return_dict=False)
    if where == "list":
        assert tok.render(messages, tools=[{"name": "f"}]).endswith("\n1")


def test_digest_differs_by_vocabulary_and_behaviour(bpe, make_folder):
    seen = set()
    llama = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "bos_token": "<s>"}
    for config in [{}, llama, {"bos_token": "<s>"}, {"chat_template": "a"}]:
        folder = make_folder(bpe, tokenizer_config_json=FAST | config)
        seen.add(Tokenizer.from_folder(folder).digest)
        assert Tokenizer.from_folder(folder).digest in seen
    assert len(seen) == 4 and all(len(d) == 64 for d in seen)


def test_no_tokenizer(tmp_path):
    with raises(NoTokenizer, match=f"{tmp_path} holds neither tokenizer.json nor tokenizer.model"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("text", [None, 3, b"bytes", ["a"], "half \ud800"])
def test_only_text_is_tokenized(bpe, make_folder, text):
    with raises(BadRequest):
        Tokenizer.from_folder(make_folder(bpe)).encode(text)


BAD = {
    "tokenizer_config_json": [
        ("[1]", "must hold an object"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ({"add_bos_token": "yes"}, "add_bos_token must be true or false"),
        ({"bos_token": 5}, "'bos_token' must be a string"),
        ({"bos_token": {"special": True}}, "'bos_token' must be a string"),
        ({"added_tokens_decoder": [1]}, "added_tokens_decoder must be an object"),
        ({"added_tokens_decoder": {"x": {"content": "a"}}}, "not a token id"),
        ({"added_tokens_decoder": {"1": {"content": 3}}}, "must be a string"),
        ({"added_tokens_decoder": {"5": {"content": "<new>"}}}, "'<new>' is token 5"),
        ({"extra_special_tokens": 3}, "must be a list"),
        ({"chat_template": [{"name": 1}]}, "chat_template must be"),
    ],
    "chat_template_json": [("3", "must hold an object"), ({"chat_template": 3}, "chat_template must be")],
    "added_tokens_json": [({"<new>": -1}, "not a token id"), ({"<new>": "a"}, "not a token id")],
}


@pytest.mark.parametrize("name, content, message", [(n, c, m) for n, rows in BAD.items() for c, m in rows])
def test_bad_settings(bpe, make_folder, name, content, message):
    with raises(BadTokenizer, match=message):
        Tokenizer.from_folder(make_folder(bpe, **{name: content}))


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"model": {"type": "BPE"}}', '{"model": null}'])
def test_bad_tokenizer_json(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with raises(BadTokenizer, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
