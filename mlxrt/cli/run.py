"""`mlxrt run MODEL [PROMPT]`: chat with a model, or answer one prompt, as other tools name it."""

import argparse

from . import chat, generate
from .chat import add_chat_flags
from .flags import MODEL_HELP, Parser


def add_flags(parser: Parser) -> None:
    parser.add_argument("name", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("words", nargs="*", metavar="PROMPT", help="answer it and end; without it, chat")
    add_chat_flags(parser)


def run(args: argparse.Namespace) -> int:
    if not args.words:
        args.model = None
        return chat.run(args)
    parser = Parser(prog="mlxrt run")
    generate.add_flags(parser)
    once = parser.parse_args(["-m", args.name, "-p", " ".join(args.words)])
    given = {name: value for name, value in vars(args).items() if name not in ("name", "words")}
    return generate.run(argparse.Namespace(**vars(once) | given))
