"""`mlxrt ls`: the models that were downloaded."""

import argparse
import json
from datetime import datetime

from .flags import Parser
from .terminal import format_bytes, note, one_line


def add_flags(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print a JSON list with name, path, bytes and date")


def run(args: argparse.Namespace) -> int:
    from ..weights.source.cached import list_cached

    found = list_cached()
    dates = [datetime.fromtimestamp(model.modified).isoformat(" ", "minutes") for model in found]
    if args.json:
        rows = [{"name": m.name, "path": str(m.path), "bytes": m.nbytes, "modified": d} for m, d in zip(found, dates)]
        print(json.dumps(rows, ensure_ascii=False))
    elif not found:
        note("no model was downloaded yet; mlxrt pull NAME fetches one")
    width = max((len(model.name) for model in found), default=0)
    for model, date in zip(found, dates) if not args.json else ():
        print(one_line(f"{model.name:<{width}}  {format_bytes(model.nbytes):>9}  {date}"))
    return 0
