"""`mlxrt state`: what is saved in a file, a bundle or a disk store, without a model. Knows no engine."""

import argparse
import json
from typing import Any

from .flags import Parser
from .terminal import amount, one_line

ACTIONS = {
    "ls": "what is saved there",
    "show": "one state, or one model's part of a disk store, in detail",
    "verify": "read every byte and compare with its digest; exit code 1 when one differs",
    "rm": "remove it",
}


def add_flags(parser: Parser) -> None:
    told = "; ".join(f"{name}: {text}" for name, text in ACTIONS.items())
    parser.add_argument("action", choices=tuple(ACTIONS), help=told)
    parser.add_argument("path", metavar="PATH", help="a saved state, a bundle of them, or the folder of a disk cache")
    parser.add_argument("name", nargs="?", metavar="NAME", help="one state of a bundle, or one model of a disk cache")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from .saved import open_saved

    saved = open_saved(args.path)
    if args.action == "ls":
        found: dict[str, Any] = {"kind": saved.kind, "path": args.path, "entries": saved.rows(args.name)}
    elif args.action == "show":
        found = {"kind": saved.kind, "path": args.path} | saved.detail(args.name)
    elif args.action == "verify":
        found = {"kind": saved.kind, "path": args.path, "entries": saved.verify(args.name)}
    else:
        found = {"kind": saved.kind, "path": args.path, "removed": saved.remove(args.name)}
    if args.json:
        print(json.dumps(found, ensure_ascii=False, allow_nan=False))
    else:
        print("\n".join(one_line(line) for line in lines(args.action, found)))
    return 1 if args.action == "verify" and any(not entry["ok"] for entry in found["entries"]) else 0


def lines(action: str, found: dict[str, Any]) -> list[str]:
    if action == "rm":
        return [f"removed {name}" for name in found["removed"]] or ["nothing was there to remove"]
    if action == "show":
        return [f"{key:<12} {value_text(key, value)}" for key, value in found.items()]
    rows = [[value_text(key, value) for key, value in entry.items()] for entry in found["entries"]]
    if not rows:
        return [f"{found['path']}: nothing is saved there"]
    heads = list(found["entries"][0])
    widths = [max(map(len, column)) for column in zip(heads, *rows)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in (heads, *rows)]


def value_text(key: str, value: Any) -> str:
    if key == "bytes":
        return amount(value)
    if key == "ok":
        return "ok" if value else "BAD"
    if isinstance(value, dict):
        return ", ".join(f"{k} {str(v)[:60]}" for k, v in value.items())
    return str(value)
