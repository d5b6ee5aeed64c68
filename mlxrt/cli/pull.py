"""`mlxrt pull`: downloads a model into the cache, so that later runs need no network."""

import argparse
import json

from .flags import Parser, add_engine_flags, engine_config
from .terminal import format_bytes, note


def add_flags(parser: Parser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="alias or hub id, like owner/name, owner/name:Q4_K_M or owner/name:FILE.gguf"
    )
    parser.add_argument("--verify", action="store_true", help="compare every file with its digest again")
    parser.add_argument("--json", action="store_true", help="print one JSON object with path and bytes")
    add_engine_flags(parser, only=("revision", "offline"))


def run(args: argparse.Namespace) -> int:
    config = engine_config(args)
    from ..weights.source.resolve import fetch

    path, size = fetch(args.model, revision=config.revision, offline=config.offline, verify=args.verify)
    if args.json:
        print(json.dumps({"model": args.model, "path": str(path), "bytes": size}))
    else:
        print(path)
        verified = ", every digest is right" if args.verify else ""
        note(f"{size} bytes ({format_bytes(size)}){verified}")
    return 0
