"""The text of an answer is what follows the prompt, also where a decoder drops the first space of a text."""

import dataclasses

import mlx.core as mx
import pytest

from mlxrt import Engine
from mlxrt.text import Tokenizer
from tests.support import toy_models as toy
from tests.text.test_detokenizer import LLAMA, chain

WORDS = ["<s>", "<unk>", "▁", *(f"▁w{i}" for i in range(40)), *(f"w{i}" for i in range(20)), "🦙", "<0xC3>", "<0xA9>"]
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def write_vocabulary(folder, decoder, prepend):
    from tokenizers import Tokenizer as Library
    from tokenizers import models, pre_tokenizers

    library = Library(models.WordLevel({t: i for i, t in enumerate(WORDS)}, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend)
    library.decoder = decoder
    library.add_special_tokens(["<s>", "<unk>"])
    library.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return Tokenizer.from_folder(folder)


def decoders():
    from tokenizers import decoders

    return {"llama": (chain(*LLAMA), "first"), "metaspace": (decoders.Metaspace(), "always")}


@pytest.fixture(params=decoders())
def engine(request, tmp_path):
    tokenizer = write_vocabulary(tmp_path, *decoders()[request.param])
    mx.random.seed(1)
    model = type("Toy", (toy.Toy,), {"kinds": "f"})(
        dataclasses.replace(toy.CONFIG, vocab_size=len(WORDS), num_hidden_layers=1)
    )
    model.fuse()
    return Engine(model, tokenizer=tokenizer)


def test_the_text_is_what_follows_the_prompt(engine):
    spaces = 0
    for i in range(16):
        prompt, options = f"w{i} w{i + 1 & 31}", {"max_tokens": 6, "temperature": 1.0, "seed": i}
        tokens = engine.tokenizer.encode(prompt)
        done = engine.generate(prompt, **options)
        before, whole = engine.tokenizer.decode(tokens), engine.tokenizer.decode([*tokens, *done.tokens])
        assert before == prompt and whole == before + done.text
        assert "".join(e.text for e in engine.stream(prompt, **options)) == done.text
        assert engine.generate(tokens, **options).text == done.text
        if done.text.startswith(" ") and done.text[1:2].strip():
            spaces += 1
            stopped = engine.generate(prompt, stop=done.text[:2], **options)
            assert (stopped.text, stopped.finish_reason) == ("", "stop")
    assert spaces > 5


def test_a_session_is_fed_its_messages(engine):
    session = engine.session()
    for text in ("w1", "w2 w3", "w4"):
        asked = [*session.messages, {"role": "user", "content": text}]
        done = session.say(text, max_tokens=4).completion
        rendered = engine.tokenizer.chat(asked)
        assert list(session.tokens) == rendered + list(done.tokens)
        assert session.messages[-1]["content"] == done.text
