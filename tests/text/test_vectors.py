"""llama.cpp's token vectors and the chat templates that come with them, when the package was fetched before."""

import importlib.util
import tarfile
from pathlib import Path

import pytest
from pytest import raises

from mlxrt.errors import BadTemplate, BadTokenizer
from mlxrt.text import Tokenizer
from mlxrt.text.chat_template import ChatTemplate

spec = importlib.util.spec_from_file_location("token_vectors", Path(__file__).with_name("token_vectors.py"))
token_vectors = importlib.util.module_from_spec(spec)
spec.loader.exec_module(token_vectors)

NEEDED = pytest.mark.skipif(
    not token_vectors.ARCHIVE.exists(), reason="fetch them with: python tests/text/token_vectors.py (77 MB, once)"
)
QUICK = ("llama-spm", "phi-3", "gpt-2", "starcoder", "deepseek-coder", "llama-bpe", "qwen2")  # the script runs them all
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi <there>"},
    {"role": "assistant", "content": "Hello é"},
    {"role": "user", "content": "Again?"},
]
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
}


@pytest.fixture(scope="module")
def archive():
    """Everything wanted from the archive, in one pass over it."""
    sets, templates = {}, {}
    with tarfile.open(token_vectors.ARCHIVE) as tar:
        for member in tar:
            name = member.name.removeprefix(token_vectors.MODELS)
            if name.startswith("templates/") and name.endswith(".jinja"):
                templates[name[10:-6]] = tar.extractfile(member).read().decode()
            stem, found, kind = name.removeprefix("ggml-vocab-").partition(".gguf")
            if found and stem in (*QUICK, *token_vectors.REFUSED):
                sets.setdefault(stem, {})[kind.strip(".") or "gguf"] = tar.extractfile(member).read()
    return sets, templates


@NEEDED
@pytest.mark.parametrize("name", QUICK)
def test_token_vectors(archive, name):
    files = archive[0][name]
    count, wrong = token_vectors.compare(files, token_vectors.metadata(files["gguf"]))
    assert count >= 46 and not wrong


@NEEDED
@pytest.mark.parametrize("name", token_vectors.REFUSED)
def test_other_kinds_are_refused(archive, name):
    with raises(BadTokenizer, match="which mlxrt cannot use"):
        Tokenizer.from_gguf(token_vectors.metadata(archive[0][name]["gguf"]))


@NEEDED
def test_real_chat_templates_against_transformers(archive):
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    names, agreed = {"bos_token": "<s>", "eos_token": "</s>"}, 0
    for name, source in archive[1].items():
        if "strftime_now" in source:
            continue  # a minute may pass between the two
        template = ChatTemplate(source, names)
        for messages, tools in ((CHAT, None), (CHAT, [TOOL]), (CHAT[1:2], None)):
            try:
                [wanted], _ = render_jinja_template(
                    [messages], tools=tools, chat_template=source, add_generation_prompt=True, **names
                )
            except (TemplateError, TypeError, ValueError, LookupError):
                with raises(BadTemplate):
                    template.render(messages, {"tools": tools}, True)
                continue
            assert template.render(messages, {"tools": tools}, True) == wanted, name
            agreed += 1
    assert len(archive[1]) > 60 and agreed > 130
