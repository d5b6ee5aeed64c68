"""`mlxrt rm`: deletes downloaded models. Folders and files that are not in a cache are left alone."""

import argparse

from .flags import Parser
from .terminal import format_bytes, note


def add_flags(parser: Parser) -> None:
    parser.add_argument("models", nargs="+", metavar="MODEL", help="a name that mlxrt ls shows")


def run(args: argparse.Namespace) -> int:
    from ..weights.source.cached import remove_cached

    for name in args.models:
        gone = remove_cached(name)
        note(f"removed {gone.name}, {format_bytes(gone.nbytes)} in {gone.path}")
    return 0
