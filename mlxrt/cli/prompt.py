"""Where the text that goes in comes from: an argument, a pipe, files beside it."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import BadRequest
from .flags import Parser

if TYPE_CHECKING:
    from ..engine.engine import Engine


def add_prompt_flags(parser: Parser) -> None:
    parser.add_argument("given", nargs="?", metavar="PROMPT", help="the prompt; - or nothing reads it from a pipe")
    parser.add_argument("-p", "--prompt", metavar="PROMPT", help="the prompt")


def add_template_flags(parser: Parser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--tools", metavar="FILE.json", help="a JSON list of tools for the chat template")
    parser.add_argument(
        "--thinking", "--enable-thinking", dest="enable_thinking", action=argparse.BooleanOptionalAction,
        help="let a model that can think aloud do so, or not (default: the template's own)",
    )  # fmt: skip


def read_prompt(args: argparse.Namespace) -> str:
    if args.given is not None and args.prompt is not None:
        raise BadRequest("two prompts are given, one with -p and one without; give one")
    text = args.prompt if args.prompt is not None else args.given
    if text == "-" or text is None:
        if text is None and sys.stdin.isatty():
            raise BadRequest("there is no prompt; give it as an argument, with -p or through a pipe")
        text = decoded(sys.stdin.buffer.read(), "stdin").removesuffix("\n").removesuffix("\r")
    if not text:
        raise BadRequest("the prompt is empty; give at least one character")
    return text


def decoded(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as bad:
        raise BadRequest(f"{where} is not UTF-8: byte {raw[bad.start]:#04x} at {bad.start}; convert it first") from None


def read_tools(path: str | None) -> tuple[dict[str, Any], ...] | None:
    if path is None:
        return None
    try:
        tools = json.loads(decoded(Path(path).read_bytes(), path))
    except (OSError, ValueError, RecursionError) as bad:
        raise BadRequest(f"--tools {path}: {bad}") from None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRequest(f"--tools {path}: expected a JSON list of objects")
    return tuple(tools)


def require_template(engine: "Engine") -> None:
    if not engine.tokenizer.has_template:
        raise BadRequest(f"{engine.source.name} has no chat template; `mlxrt generate --raw` continues plain text")
