"""The flags of `mlxrt generate --prompts`, checked before anything is loaded."""

import argparse

from ..errors import BadRequest
from .flags import Parser


def add_batch_flags(parser: Parser) -> None:
    parser.add_argument("--prompts", metavar="FILE.jsonl", help="many prompts, one JSON text or object a line")
    parser.add_argument("--parallel", type=int, metavar="N", help="with --prompts: answer N at once (default: 8)")
    parser.add_argument("--output", metavar="FILE", help="with --prompts: write the results there, not to stdout")


def check_batch_flags(args: argparse.Namespace) -> None:
    if args.prompts is None:
        for name in ("parallel", "output"):
            if vars(args)[name] is not None:
                raise BadRequest(f"--{name} goes with --prompts FILE.jsonl")
        return
    if args.prompt is not None or args.given is not None:
        raise BadRequest("there is a prompt and a file of prompts; give one of them")
    if args.parallel is not None and not 1 <= args.parallel <= 4096:
        raise BadRequest(f"--parallel must be in 1..4096, not {args.parallel}")
