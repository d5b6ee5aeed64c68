"""Tiny tokenizers of every kind, trained here: no vocabulary is committed."""

import json
from pathlib import Path

import pytest

LINES = [
    "The capital of France is Paris, isn't it? We've seen 3.14 and 1000 llamas!",
    "Größe, naïve café, Ελληνικά, русский язык, 日本語のテキスト, 한국어, العربية",
    "def f(x):\n    return x ** 2  # a comment\n\n\n\tindented\r\nwindows",
    "🦙🦙 emoji 👩‍👩‍👧 family, flags 🇫🇷 and   many    spaces",
    "'s 't 're 've 'm 'll 'd 'S 'LL don't do not n't",
]
SAMPLES = [
    *LINES,
    "",
    " ",
    "  leading",
    "trailing  ",
    "\n",
    "\n\n \t x",
    "<s>",
    "a<s>b</s>c",
    "<|im_start|>user\nhi<|im_end|>\n",
    "x<tool>y <tool> z",
    "unseen: ⟪ƒ⟫ 𝔘𝔫𝔦 \u0301 \U0010ffff",
    "0123456789",
    "A" * 200,
]


@pytest.fixture(scope="session")
def samples() -> list[str]:
    return SAMPLES


def trained_bpe(vocab_size: int = 450):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=names, initial_alphabet=alphabet, show_progress=False
    )
    tok.train_from_iterator(LINES * 3, trainer)
    return tok


@pytest.fixture(scope="session")
def bpe():
    return trained_bpe()


@pytest.fixture
def make_folder(tmp_path):
    """A folder with a tokenizer.json and whatever other files are given, by name."""

    def make(tok, **files) -> Path:
        tok.save(str(tmp_path / "tokenizer.json"))
        for name, content in files.items():
            stem, _, ending = name.rpartition("_")
            text = content if isinstance(content, str) else json.dumps(content)
            (tmp_path / f"{stem}.{ending}").write_text(text, encoding="utf-8")
        return tmp_path

    return make


def train_spm(folder: Path, kind: str, **options) -> bytes:
    import sentencepiece

    (folder / "in.txt").write_text(
        "\n".join(line for text in LINES * 4 for line in text.splitlines()), encoding="utf-8"
    )
    settings = {
        "vocab_size": 460,
        "byte_fallback": True,
        "character_coverage": 0.98,
        "split_digits": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
        "hard_vocab_limit": False,
        "num_threads": 1,
        "minloglevel": 2,
    }
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "in.txt"), model_prefix=str(folder / "tokenizer"), model_type=kind, **(settings | options)
    )
    return (folder / "tokenizer.model").read_bytes()


@pytest.fixture(scope="session")
def spm_bpe(tmp_path_factory) -> bytes:
    return train_spm(tmp_path_factory.mktemp("spm"), "bpe", user_defined_symbols=["<tool>"])


@pytest.fixture(scope="session")
def spm_unigram(tmp_path_factory) -> bytes:
    return train_spm(tmp_path_factory.mktemp("spm"), "unigram", vocab_size=400)


@pytest.fixture(scope="session")
def spm_metadata(spm_bpe) -> dict:
    """The SentencePiece model as a GGUF file would carry it."""
    import sentencepiece

    p = sentencepiece.SentencePieceProcessor(model_proto=spm_bpe)
    ids = range(p.get_piece_size())

    def kind(i: int) -> int:
        if p.is_unknown(i):
            return 2
        if p.is_control(i):
            return 3
        if p.is_byte(i):
            return 6
        return 4 if p.id_to_piece(i) == "<tool>" else 1

    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [p.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [p.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": [kind(i) for i in ids],
        "tokenizer.ggml.bos_token_id": p.bos_id(),
        "tokenizer.ggml.eos_token_id": p.eos_id(),
        "tokenizer.ggml.unknown_token_id": p.unk_id(),
    }


@pytest.fixture(scope="session")
def bpe_metadata(bpe) -> dict:
    """The byte-level BPE as a GGUF file would carry it."""
    model = json.loads(bpe.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    special = {t.content for t in bpe.get_added_tokens_decoder().values()}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if t in special else 1 for t in tokens],
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in model["merges"]],
        "tokenizer.ggml.bos_token_id": tokens.index("<s>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.chat_template": "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
    }
