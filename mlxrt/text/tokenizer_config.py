"""Reads tokenizer_config.json, the older files beside it, and chat templates."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import BadTokenizer
from .vocabulary import is_encodable

# Tokenizer classes whose add_bos_token and add_eos_token overrule the post-processor of tokenizer.json.
LLAMA_LIKE = {f"{name}Tokenizer{fast}" for name in ("Llama", "CodeLlama", "Gemma", "Cohere") for fast in ("", "Fast")}
FORCED_CLEAN_UP = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class Added:
    """An added token. Its repr is part of the tokenizer's digest, so that names here are part of saved states."""

    text: str
    id: int | None = None  # where the files give one
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


@dataclass(frozen=True)
class Settings:
    names: dict[str, str] = field(default_factory=dict)  # bos_token ... and other tokens chat templates name
    extra: tuple[str, ...] = ()  # further special tokens
    added: tuple[Added, ...] = ()  # in the order of their ids
    templates: dict[str, str] = field(default_factory=dict)
    llama_like: bool = False
    add_bos: bool | None = None
    add_eos: bool | None = None
    clean_up: bool = False
    clean_up_bpe: bool = False
    legacy: bool = False
    prefix_space: bool | None = None
    split_special: bool = False


def read_settings(folder: Path) -> Settings:
    config = read_object(folder / "tokenizer_config.json")
    older = {} if "added_tokens_decoder" in config else read_object(folder / "special_tokens_map.json")
    merged = {**config, **older}  # the older file counts where the newer one does not list the added tokens
    extra = merged.get("extra_special_tokens")
    own = [role for role in config if role.endswith("_token") and isinstance(config[role], str)]  # image_token ...
    names = {role: content(merged.get(role), role) for role in (*ROLES, *own)}
    if isinstance(extra, dict):
        names |= {role: content(token, role) for role, token in extra.items()}
    lists = [extra, merged.get("additional_special_tokens")]
    return Settings(
        names={role: text for role, text in names.items() if text is not None},
        extra=tuple(dict.fromkeys(text for tokens in lists for text in special_token_list(tokens))),
        added=read_added(folder, config),
        templates=read_templates(folder, config),
        llama_like=str(config.get("tokenizer_class")) in LLAMA_LIKE,
        add_bos=flag(config, "add_bos_token", None),
        add_eos=flag(config, "add_eos_token", None),
        clean_up=bool(flag(config, "clean_up_tokenization_spaces", False)),
        clean_up_bpe=bool(flag(config, FORCED_CLEAN_UP, False)),
        legacy=bool(flag(config, "legacy", False)),
        prefix_space=flag(config, "add_prefix_space", None),
        split_special=bool(flag(config, "split_special_tokens", False)),
    )


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(read_bytes(path))
    except (ValueError, RecursionError) as e:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise BadTokenizer(f"{path} is not valid JSON: {e}") from None
    if not isinstance(found, dict):
        raise BadTokenizer(f"{path} must hold an object, not a {type(found).__name__}")
    return found


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as e:
        raise BadTokenizer(f"{path} cannot be read: {e.strerror}") from None


def flag(config: dict[str, Any], key: str, default: bool | None) -> bool | None:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise BadTokenizer(f"tokenizer_config.json: {key} must be true or false, not {value!r:.40}")
    return default if value is None else value


def content(token: Any, where: str) -> str | None:
    """The text of a token that is given as a string or as an object with `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    if text is None and not isinstance(token, dict):
        return None
    if not isinstance(text, str) or not is_encodable(text):
        raise BadTokenizer(f"{where!a:.60} must be a string or an object with `content`, not {token!r:.80}")
    return text or None


def special_token_list(tokens: Any) -> list[str]:
    if tokens is None or isinstance(tokens, dict):
        return []
    if not isinstance(tokens, list):
        raise BadTokenizer(f"extra special tokens must be a list, not {tokens!r:.40}")
    return [text for token in tokens if (text := content(token, "an extra special token")) is not None]


def read_added(folder: Path, config: dict[str, Any]) -> tuple[Added, ...]:
    """From tokenizer_config.json (by id), else from added_tokens.json (by text)."""
    by_id = config.get("added_tokens_decoder") or {}
    if not isinstance(by_id, dict):
        raise BadTokenizer(f"tokenizer_config.json: added_tokens_decoder must be an object, not {by_id!r:.40}")
    found = [parse_added(key, token) for key, token in by_id.items()]
    if not found:
        rows = read_object(folder / "added_tokens.json").items()
        found = [Added(content(text, "an added token") or "", token_id(i, text), special=False) for text, i in rows]
    return tuple(sorted((a for a in found if a.text), key=lambda a: a.id or 0))


def parse_added(key: str, token: Any) -> Added:
    text = content(token, f"added_tokens_decoder[{key}]")
    flags = {name: token.get(name, False) for name in FLAGS} if isinstance(token, dict) else {}
    if text is None or not all(isinstance(v, bool) for v in flags.values()):
        raise BadTokenizer(f"tokenizer_config.json: added_tokens_decoder[{key!a:.40}] is not a token: {token!r:.80}")
    return Added(text, token_id(int(key) if key.isdecimal() and len(key) < 12 else key, text), **flags)


FLAGS = ("special", "lstrip", "rstrip", "single_word", "normalized")


def token_id(value: Any, text: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
        raise BadTokenizer(f"the added token {text!r:.60} has id {value!r:.40}, which is not a token id")
    return value


def read_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """By name. chat_template.jinja wins over tokenizer_config.json, that over chat_template.json."""
    found = named_templates(read_object(folder / "chat_template.json").get("chat_template"))
    found |= named_templates(config.get("chat_template"))
    files = {"default": folder / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    for name, path in files.items():
        if path.is_file():
            found[name] = read_text(path)
    return found


def read_text(path: Path) -> str:
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as e:
        raise BadTokenizer(f"{path} is not UTF-8: {e}") from None


def named_templates(value: Any) -> dict[str, str]:
    """One template, or a list of {name, template}."""
    if value is None:
        return {}
    rows = [{"name": "default", "template": value}] if isinstance(value, str) else value
    if isinstance(rows, dict):
        rows = [{"name": name, "template": text} for name, text in rows.items()]
    good = isinstance(rows, list) and all(
        isinstance(r, dict) and isinstance(r.get("name"), str) and isinstance(r.get("template"), str) for r in rows
    )
    if not good:
        raise BadTokenizer(f"chat_template must be a string or a list of {{name, template}}, not {value!r:.80}")
    return {row["name"]: row["template"] for row in rows}
