"""`--schema`, `--json-object`, `--regex`, `--choice`, `--grammar`: the form of the answer."""

import argparse
import json
from pathlib import Path
from typing import Any

from ..errors import BadRequest
from ..text.response_format import ResponseFormat
from .flags import Parser

FLAGS = ("schema", "json_object", "regex", "choice", "grammar")


def add_format_flags(parser: Parser) -> None:
    group = parser.add_argument_group("form of the answer (one of them; after the model's reasoning)")
    group.add_argument("--schema", metavar="FILE.json", help="JSON that fits this JSON schema")
    group.add_argument("--json-object", action="store_true", default=None, help="any JSON object")
    group.add_argument("--regex", metavar="R", help="text that matches this regular expression as a whole")
    group.add_argument("--choice", metavar="A,B", help="one of these texts; a JSON list where one holds a comma")
    group.add_argument("--grammar", metavar="FILE", help="text of this grammar (Lark or GBNF)")


def read_format(args: argparse.Namespace) -> ResponseFormat | None:
    """The format that the flags ask for, checked."""
    given = [name for name in FLAGS if getattr(args, name) is not None]
    if len(given) > 1:
        one, other = (f"--{name.replace('_', '-')}" for name in given[:2])
        raise BadRequest(f"{one} and {other} both say what the answer looks like; give one of them")
    if not given:
        return None
    [name] = given
    value = getattr(args, name)
    if name == "schema":
        return ResponseFormat.parse({"type": "json_schema", "schema": read_json(value)})
    if name == "json_object":
        return ResponseFormat.parse({"type": "json_object"})
    if name == "regex":
        return ResponseFormat.parse({"type": "regex", "pattern": value})
    if name == "choice":
        return ResponseFormat.parse({"type": "choice", "choices": read_choices(value)})
    return ResponseFormat.parse({"type": "grammar", "grammar": read_text(value, "--grammar")})


def read_text(path: str, flag: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except OSError as error:
        raise BadRequest(f"{flag} {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise BadRequest(f"{flag} {path}: {error}") from None


def read_json(path: str) -> Any:
    try:
        return json.loads(read_text(path, "--schema"))
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"--schema {path}: not JSON ({error})") from None


def read_choices(value: str) -> Any:
    if value.startswith("["):
        try:
            return json.loads(value)
        except ValueError as error:
            raise BadRequest(f"--choice: not a JSON list ({error})") from None
    return value.split(",")
