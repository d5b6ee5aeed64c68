"""Damaged files: whatever is wrong with them, only our own errors come out."""

import copy
import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxrt.errors import MlxrtError
from mlxrt.text import Tokenizer

QUIET = settings(deadline=None, max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=6) | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)
CONFIG = {
    "tokenizer_class": "LlamaTokenizer",
    "bos_token": "<s>",
    "eos_token": {"content": "</s>", "lstrip": False},
    "add_bos_token": True,
    "add_eos_token": False,
    "clean_up_tokenization_spaces": False,
    "legacy": False,
    "extra_special_tokens": ["<x>"],
    "added_tokens_decoder": {"0": {"content": "<|endoftext|>", "special": True, "lstrip": False}},
    "chat_template": [{"name": "default", "template": "{{ messages[0].content }}{{ tools | tojson }}"}],
}
TOUCHED = (
    "normalizer",
    "pre_tokenizer",
    "post_processor",
    "decoder",
    "added_tokens",
    "truncation",
    "padding",
    "version",
)


def paths(tree, path=()):
    """Every place in a JSON value, except inside the long tables."""
    yield path
    if isinstance(tree, dict) and len(tree) < 40:
        for key, value in tree.items():
            yield from paths(value, (*path, key))
    if isinstance(tree, list) and len(tree) < 40:
        for i, value in enumerate(tree):
            yield from paths(value, (*path, i))


def damage(tree, data):
    """Replace or remove one thing somewhere."""
    tree = copy.deepcopy(tree)
    path = data.draw(st.sampled_from([p for p in paths(tree) if p]))
    at = tree
    for step in path[:-1]:
        at = at[step]
    if data.draw(st.booleans()):
        at[path[-1]] = data.draw(VALUES)
    else:
        del at[path[-1]]
    return tree


def use(make) -> None:
    """Load and use; an error of ours is as good as an answer."""
    try:
        tok = make()
        ids = tok.encode("Hello <x> é\n")
        tok.decode(ids, skip_special=False)
        stream = tok.detokenizer()
        "".join(stream.push(i) for i in range(tok.vocab_size)[:50])
        stream.finish()
        tok.chat([{"role": "user", "content": "hi"}])
    except MlxrtError as e:
        assert "\n" not in str(e) and len(str(e)) < 2000


@QUIET
@given(data=st.data())
def test_tokenizer_config(bpe, make_folder, data):
    folder = make_folder(bpe, tokenizer_config_json=damage(CONFIG, data))
    use(lambda: Tokenizer.from_folder(folder))


@QUIET
@given(data=st.data())
def test_tokenizer_json(bpe, make_folder, data):
    full = json.loads(bpe.to_str())
    model = {k: v for k, v in full["model"].items() if k not in ("vocab", "merges")}
    small = damage({k: full[k] for k in TOUCHED} | {"model": model}, data)
    if isinstance(small.get("model"), dict):
        small["model"] = {"vocab": full["model"]["vocab"], "merges": full["model"]["merges"]} | small["model"]
    folder = make_folder(bpe, tokenizer_config_json=CONFIG)
    (folder / "tokenizer.json").write_text(json.dumps(small))
    use(lambda: Tokenizer.from_folder(folder))


@QUIET
@given(data=st.data())
def test_bytes_of_tokenizer_json(bpe, make_folder, data):
    folder = make_folder(bpe)
    full = bytearray((folder / "tokenizer.json").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        full[data.draw(st.integers(0, len(full) - 1))] = data.draw(st.integers(0, 255))
    (folder / "tokenizer.json").write_bytes(full[: data.draw(st.sampled_from([len(full), len(full) // 2]))])
    use(lambda: Tokenizer.from_folder(folder))


@QUIET
@given(data=st.data())
def test_metadata(bpe_metadata, spm_metadata, data):
    metadata = dict(data.draw(st.sampled_from([bpe_metadata, spm_metadata])))
    for key in data.draw(st.sets(st.sampled_from(sorted(metadata)), max_size=2)):
        value = metadata[key]
        if isinstance(value, list) and data.draw(st.booleans()):
            metadata[key] = list(value)
            metadata[key][data.draw(st.integers(0, len(value) - 1))] = data.draw(VALUES)
        else:
            metadata[key] = data.draw(VALUES)
    extra = st.sampled_from(
        ["add_bos_token", "add_space_prefix", "eot_token_id", "pre", "unknown_token_id", "add_eos_token"]
    )
    metadata |= {"tokenizer.ggml." + data.draw(extra): data.draw(VALUES)}
    use(lambda: Tokenizer.from_gguf(metadata))


@QUIET
@given(data=st.data())
def test_sentencepiece_model(spm_bpe, tmp_path, data):
    full = bytearray(spm_bpe)
    for _ in range(data.draw(st.integers(0, 3))):
        full[data.draw(st.integers(0, len(full) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "tokenizer.model").write_bytes(full[: data.draw(st.integers(0, len(full)))])
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(CONFIG | {"added_tokens_decoder": {}}))
    use(lambda: Tokenizer.from_folder(tmp_path))
